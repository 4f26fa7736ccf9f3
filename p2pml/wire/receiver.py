"""The receiving half of a session: channels, offers, refusals, and the credit that goes back. No I/O."""

from __future__ import annotations

from typing import Any

from p2pml.errors import MessageError, MessageTooLarge, ProtocolError
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget, ReceiveWindow
from p2pml.wire.framing import FIRST, LAST, MAX_CONTROL, SIZE, FrameType, Target, frame
from p2pml.wire.incoming import Incoming, Place, ReceiveChannel
from p2pml.wire.options import ChannelOptions
from p2pml.wire.shared import Shared

WHOLE = FIRST | LAST
ACK_DELAY = 0.02
"""Seconds that the acknowledgement of small messages may wait for company."""


class Receiver:
    """Takes DATA, OFFER, RESET and BLOCKED; tells `Arrived` and `MessageDiscarded`."""

    def __init__(self, shared: Shared, budget: MemoryBudget, max_message: int, place: Place | None) -> None:
        self._shared = shared
        self._budget = budget
        self._max_message = max_message
        self._place = place
        self._channels: dict[int, ReceiveChannel] = {}
        self._numbers: dict[str, int] = {}
        self.link = ReceiveWindow(0)
        self._reserved = 0
        self._current: Incoming | None = None
        self._current_channel: ReceiveChannel | None = None

    # ----------------------------------------------------------------------------------------------------- channels

    def add_channel(self, name: str, options: ChannelOptions) -> None:
        """Open a channel; the link's window grows by the channel's, so that no channel can use up another's share."""
        number = len(self._numbers) + 1
        self._numbers[name] = number
        self._channels[number] = ReceiveChannel(number, name, options)
        grown = self.link.size + options.bytes
        if self._reserved and self._budget.try_reserve(options.bytes):
            self._reserved += options.bytes
        self.link.resize(grown)

    def describe(self) -> list[Any]:
        """The channels, as HELLO and CHANNELS tell them."""
        return [channel.describe() for channel in self._channels.values()]

    def reserve(self) -> bool:
        """Take the memory of all windows from the budget; false if it is not there."""
        if not self._budget.try_reserve(self.link.size):
            return False
        self._reserved = self.link.size
        return True

    def close(self) -> None:
        """Give all memory back."""
        for channel in self._channels.values():
            for incoming in channel.due:
                self._free(incoming)
            channel.due.clear()
        self._budget.release(self._reserved)
        self._reserved = 0

    def channel(self, number: int) -> ReceiveChannel:
        """The channel with this number. Raises `ProtocolError`."""
        try:
            return self._channels[number]
        except KeyError:
            known = ", ".join(self._numbers) or "none"
            raise ProtocolError(f"there is no channel {number} here (there are: {known})") from None

    def limits(self, number: int) -> tuple[int, int, int]:
        """What a CREDIT frame says of a channel: message limit, byte limit, messages complete."""
        channel = self._channels[number]
        channel.told = channel.complete
        return channel.messages.limit, channel.bytes.limit, channel.complete

    def acknowledge(self) -> None:
        """Have every channel told of whose new messages the other side does not know yet."""
        for channel in self._channels.values():
            if channel.told != channel.complete:
                self._shared.dirty[channel.id] = None

    # --------------------------------------------------------------------------------------------------------- data

    def data_received(self, flags: int, channel: int, sequence: int, head: memoryview, payload: memoryview) -> None:
        """A whole DATA frame; mostly a whole small message."""
        inbox = self._channels.get(channel) or self.channel(channel)
        if flags != WHOLE or inbox.due:
            self.data_started(flags, channel, sequence, head, len(payload)).feed(payload)
            self.data_finished()
            return
        if not head and self._shared.open:
            # The hot path of small messages: what `_start` does, in line. Whatever is amiss goes there, to be named.
            size = len(payload)
            messages, window, link = inbox.messages, inbox.bytes, self.link
            if (
                sequence == inbox.introduced & 0xFFFFFFFF
                and messages.received < messages.limit
                and window.received + size <= window.limit
                and link.received + size <= link.limit
                and size <= inbox.options.eager
            ):
                inbox.introduced += 1
                messages.received += 1
                window.received += size
                link.received += size
                self._arrived(inbox, bytes(payload), size)
                return
        incoming = self._start(inbox, sequence, bytes(head), len(payload))
        if incoming.fault is not None:
            self._refuse(inbox, incoming, incoming.fault)
        else:
            incoming.take_memory()
            incoming.feed(payload)
            self._complete(inbox, incoming)

    def data_started(self, flags: int, channel: int, sequence: int, head: memoryview, length: int) -> Target:
        """A DATA frame of which a part is still to come: where to put its payload."""
        inbox = self.channel(channel)
        if inbox.due:
            incoming = inbox.due[0]
            if incoming.sequence != sequence or not incoming.accepted:
                raise ProtocolError(f"channel '{inbox.name}': data of message {sequence} came out of turn")
        else:
            if not flags & FIRST:
                raise ProtocolError(f"channel '{inbox.name}': message {sequence} has no beginning")
            total = length if flags & LAST else self._declared(inbox, head)
            incoming = self._start(inbox, sequence, bytes(head), total)
            inbox.due.append(incoming)
            incoming.accepted = True
            incoming.take_memory()
        if length > incoming.remaining or (flags & LAST and length != incoming.remaining):
            raise ProtocolError(f"channel '{inbox.name}': message {sequence} ends at another size than declared")
        self._current, self._current_channel = incoming, inbox
        return incoming

    def data_finished(self) -> bool:
        """The payload that was started is complete; true if more of its message follows."""
        incoming, inbox = self._current, self._current_channel
        assert incoming is not None and inbox is not None
        if incoming.remaining:
            return True
        self._current = self._current_channel = None
        inbox.due.popleft()
        if incoming.fault is not None:
            self._refuse(inbox, incoming, incoming.fault)
        else:
            self._complete(inbox, incoming)
        return bool(inbox.due)

    def _start(self, inbox: ReceiveChannel, sequence: int, head: bytes, payload: int) -> Incoming:
        if not self._shared.open:
            raise ProtocolError("data came before the handshake was complete")
        incoming = inbox.start(sequence, head, payload, self._max_message)
        self.link.receive(incoming.charge, "link, bytes")
        return incoming

    def _declared(self, inbox: ReceiveChannel, head: memoryview) -> int:
        """The payload of an unoffered message in several frames, from its head."""
        try:
            return codec.decode_head(bytes(head), max_message=self._max_message).wire_size
        except MessageError as error:
            raise ProtocolError(f"channel '{inbox.name}': {error}") from None

    def _complete(self, inbox: ReceiveChannel, incoming: Incoming) -> None:
        if incoming.offered:
            self._shared.dirty[inbox.id] = None
        try:
            if incoming.head is not None and incoming.head.codec is not None:
                packed = (incoming.head, incoming.buffers)
                self._arrived(inbox, None, incoming.charge, incoming.reserved, packed)
            else:
                self._arrived(inbox, incoming.message(), incoming.charge, incoming.reserved)
        except MessageError as error:
            self._refuse(inbox, incoming, error)

    def _arrived(self, inbox: ReceiveChannel, message: Any, charge: int, reserved: int = 0, packed: Any = None) -> None:
        shared = self._shared
        shared.messages_in += 1
        if shared.ack_due is None:
            shared.ack_due = shared.now + ACK_DELAY
        shared.events.append(events.Arrived(inbox, message, charge, reserved, packed))

    # -------------------------------------------------------------------------------------- offers, refusals, resets

    def offer_received(self, number: int, sequence: int, head: bytes, payload: bytes) -> None:
        """An OFFER: accept it as soon as there is memory, or refuse it."""
        if len(payload) != SIZE.size:
            raise ProtocolError("a malformed OFFER")
        inbox = self.channel(number)
        incoming = inbox.offer(sequence, head, SIZE.unpack(payload)[0], self._max_message)
        self.link.receive(incoming.charge, "link, bytes")
        try:
            placed, need = self._find_place(inbox, incoming)
        except MessageError as error:
            self._refuse(inbox, incoming, error)
            return
        inbox.due.append(incoming)

        def granted() -> None:
            incoming.grant, incoming.reserved = None, need
            try:
                incoming.take_memory(placed)
            except MemoryError:
                inbox.due.remove(incoming)
                self._refuse(inbox, incoming, MessageTooLarge(f"no memory for a message of {need} bytes"))
                return
            incoming.accepted = True
            self._shared.control.append(frame(FrameType.ACCEPT, channel=inbox.id, sequence=sequence))
            self._shared.notify()

        incoming.grant = granted
        if need:
            self._budget.reserve(need, granted)
        else:
            granted()

    def _find_place(self, inbox: ReceiveChannel, incoming: Incoming) -> tuple[list[memoryview] | None, int]:
        """Where an offered message goes, if its receiver says so; and what it needs of the budget otherwise."""
        if incoming.fault is not None:
            raise incoming.fault
        head, need = incoming.head, incoming.size
        if head is not None and head.codec is not None:
            need += head.raw_size
        elif head is not None and self._place is not None and (found := self._place(inbox.name, head)) is not None:
            placed = [memoryview(buffer).cast("B") for buffer in found]
            if [len(buffer) for buffer in placed] != head.sizes or any(buffer.readonly for buffer in placed):
                raise MessageError(f"{head.kind}: the place for it is not writable memory of {head.sizes} bytes")
            return placed, 0
        if need > self._budget.total - self._reserved:
            raise MessageTooLarge(f"{need} bytes do not fit this peer's receive memory of {self._budget.total}")
        return None, need

    def reset_received(self, number: int, sequence: int) -> None:
        """The sender took a message back."""
        inbox = self.channel(number)
        incoming = inbox.find(sequence)
        if incoming is not None:
            inbox.due.remove(incoming)
            self._free(incoming)
            self._consume(inbox, incoming.charge)
            self._shared.dirty[inbox.id] = None

    def _refuse(self, inbox: ReceiveChannel, incoming: Incoming, error: MessageError) -> None:
        """Don't take this message, tell its sender why, and go on."""
        reason = str(error).encode()[:MAX_CONTROL]
        refusal = frame(FrameType.REFUSE, channel=inbox.id, sequence=incoming.sequence, payload=reason)
        self._shared.control.append(refusal)
        self._free(incoming)
        self._consume(inbox, incoming.charge)
        self._shared.dirty[inbox.id] = None
        self._shared.events.append(events.MessageDiscarded(inbox.name, error))

    def _free(self, incoming: Incoming) -> None:
        incoming.drop_memory()
        if incoming.grant is not None:
            self._budget.withdraw(incoming.grant)
            incoming.grant = None
        elif incoming.reserved:
            self._budget.release(incoming.reserved)
            incoming.reserved = 0

    # ------------------------------------------------------------------------------------------------------- credit

    def consumed(self, arrived: events.Arrived) -> None:
        """The application took this message: give its credit back."""
        if arrived.reserved:
            self._budget.release(arrived.reserved)
            arrived.reserved = 0
        self._consume(arrived.inbox, arrived.charge)

    def _consume(self, inbox: ReceiveChannel, charge: int) -> None:
        told_messages, told_bytes = inbox.messages.consume(1), inbox.bytes.consume(charge)
        if told_messages or told_bytes:
            self._shared.dirty[inbox.id] = None
        if self.link.consume(charge):
            self._shared.dirty[0] = None

    def grant(self, name: str, messages: int) -> None:
        """Let the other side send `messages` more on a manual channel."""
        inbox = self._channels[self._numbers[name]]
        inbox.messages.grant(messages)
        if self._shared.open:
            self._shared.dirty[inbox.id] = None

    def blocked_received(self, number: int) -> None:
        """The other side waits for credit: give back at once what is owed."""
        inbox = self.channel(number)
        owed = [window.consume(0, at_once=True) for window in (inbox.messages, inbox.bytes, self.link)]
        if any(owed):
            self._shared.dirty[number] = None
