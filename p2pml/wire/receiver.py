"""The receiving half of a session: channels, offers, refusals, and the credit that goes back. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from p2pml.errors import MessageError, MessageTooLarge, ProtocolError
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget, ReceiveWindow
from p2pml.wire.framing import FIRST, LAST, MAX_CONTROL, MAX_PAYLOAD, SIZE, FrameType, Target, frame
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
        self._reserved: int | None = None
        self._growing: list[Callable[[], None]] = []
        self._closed = False
        self._current: Incoming | None = None
        self._current_channel: ReceiveChannel | None = None

    # ----------------------------------------------------------------------------------------------------- channels

    def add_channel(self, name: str, options: ChannelOptions) -> bool:
        """Open a channel; the link's window grows by the channel's, so that no channel can use up another's share.

        On a link that has its memory already, that of the channel is taken from the budget, and until it is there the
        channel gives no credit. False if it can never be there.
        """
        # What comes without an offer fits the window, a frame, and the largest message.
        eager = min(options.eager, options.bytes, MAX_PAYLOAD, self._max_message)
        number = len(self._numbers) + 1
        self._numbers[name] = number
        channel = self._channels[number] = ReceiveChannel(number, name, replace(options, eager=eager))
        if self._reserved is None:
            self.link.resize(self.link.size + options.bytes)
        elif self._budget.try_reserve(options.bytes, fixed=True):
            self._grow(options.bytes)
        elif self._budget.could_fit(options.bytes):
            channel.bytes = ReceiveWindow(0)

            def granted() -> None:
                self._growing.remove(granted)
                self._grow(options.bytes)
                channel.bytes.resize(options.bytes)
                self._shared.dirty[number] = None
                self._shared.notify()

            self._growing.append(granted)
            self._budget.reserve(options.bytes, granted, fixed=True)
        else:
            return False
        return True

    def _grow(self, size: int) -> None:
        assert self._reserved is not None
        self._reserved += size
        self.link.resize(self.link.size + size)

    def describe(self) -> list[Any]:
        """The channels, as HELLO and CHANNELS tell them."""
        return [channel.describe() for channel in self._channels.values()]

    def reserve(self) -> bool:
        """Take the memory of all windows from the budget; false if it is not there."""
        if not self._budget.try_reserve(self.link.size, fixed=True):
            return False
        self._reserved = self.link.size
        return True

    def close(self) -> None:
        """Give all memory back, but that of messages which the application has not taken yet (see `consumed`)."""
        unread = self.link.received - self.link.consumed
        for growing in self._growing:
            self._budget.withdraw(growing)
        for channel in self._channels.values():
            for incoming in channel.due:
                unread -= incoming.charge
                self._free(incoming)
            channel.due.clear()
        if self._reserved is not None:
            self._budget.release(self._reserved - unread, fixed=True)
        self._reserved, self._closed = None, True

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
        return channel.messages.renew(), channel.bytes.renew(), channel.told

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
        # The hot path of small messages: what `_start` does, in line. Whatever is amiss goes there, to be named.
        shared, messages, window, link = self._shared, inbox.messages, inbox.bytes, self.link
        size = len(payload) + len(head)
        if (
            shared.open
            and sequence == inbox.introduced & 0xFFFFFFFF
            and messages.received < messages.limit
            and window.received + size <= window.limit
            and link.received + size <= link.limit
            and size <= inbox.eager
            and (message := _without_tensors(head, payload, self._max_message) if head else bytes(payload)) is not None
        ):
            inbox.introduced += 1
            messages.received += 1
            window.received += size
            link.received += size
            shared.messages_in += 1
            if shared.ack_due is None:
                shared.ack_due = shared.now + ACK_DELAY
            shared.events.append(events.Arrived(inbox, message, size, 0, None))
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
            if flags != WHOLE:
                raise ProtocolError(f"channel '{inbox.name}': message {sequence} came in pieces and without an offer")
            incoming = self._start(inbox, sequence, bytes(head), length)
            inbox.due.append(incoming)
            incoming.accepted = True
            incoming.take_memory()
        if length > incoming.remaining or bool(flags & LAST) != (length == incoming.remaining):
            raise ProtocolError(f"channel '{inbox.name}': message {sequence} ends at another size than declared")
        self._current, self._current_channel = incoming, inbox
        return incoming

    def data_finished(self) -> bool:
        """The payload that was started is complete; true if more of its message follows."""
        incoming, inbox = self._current, self._current_channel
        assert incoming is not None
        assert inbox is not None
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
            if not self._shared.open:
                return  # `close` is about to free it
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
            return _place_in(head, found), 0
        if not self._budget.could_fit(need):
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
        reason = str(error).encode(errors="replace")[:MAX_CONTROL]
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
        """The application took this message: give its credit, or after the end its memory, back. Once for each message."""
        if arrived.reserved:
            self._budget.release(arrived.reserved)
            arrived.reserved = 0
        if self._closed:
            self._budget.release(arrived.charge, fixed=True)
            return
        self._consume(arrived.inbox, arrived.charge)

    def _consume(self, inbox: ReceiveChannel, charge: int) -> None:
        messages, window, link, blocked = inbox.messages, inbox.bytes, self.link, inbox.blocked
        messages.consumed += 1
        window.consumed += charge
        link.consumed += charge
        if blocked or messages.consumed >= messages.due or window.consumed >= window.due or link.consumed >= link.due:
            self._shared.dirty[inbox.id] = None
            inbox.blocked = False

    def grant(self, name: str, messages: int) -> None:
        """Let the other side send `messages` more on a manual channel."""
        inbox = self._channels[self._numbers[name]]
        inbox.messages.grant(messages)
        self._shared.dirty[inbox.id] = None

    def blocked_received(self, number: int) -> None:
        """The other side waits for credit: give back at once what is owed, or what is taken next."""
        inbox = self.channel(number)
        inbox.blocked = not (inbox.messages.owed or inbox.bytes.owed or self.link.owed)
        if not inbox.blocked:
            self._shared.dirty[number] = None


def _place_in(head: codec.Head, found: Sequence[Any]) -> list[memoryview]:
    """The memory that the application gave for a message, as bytes. Raises `MessageError` if it does not fit."""
    views = [memoryview(buffer) for buffer in found]
    sizes = [view.nbytes for view in views]
    if sizes != head.sizes or not all(view.c_contiguous and not view.readonly for view in views if view.nbytes):
        raise MessageError(f"{head.kind}: the place for it is not writable, contiguous memory of {head.sizes} bytes")
    return [view.cast("B") if view.nbytes else memoryview(b"") for view in views]


def _without_tensors(head: memoryview, payload: memoryview, max_message: int) -> Any:
    """The message that is all in its head; None if it has tensors, or there is something wrong with it."""
    if payload:
        return None
    try:
        parsed = codec.decode_head(head, max_message=max_message)
        return None if parsed.specs else codec.build(parsed, ())
    except MessageError:
        return None
