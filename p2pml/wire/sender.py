"""The sending half of a session: queues of messages, the other side's credit, and whose turn it is. No I/O."""

from __future__ import annotations

from typing import Any

from p2pml.errors import MessageError, MessageRefused, MessageTooLarge, P2PMLError, ProtocolError
from p2pml.wire import events
from p2pml.wire.credits import SendWindow
from p2pml.wire.framing import FIRST, HEADER, LAST, MAX_PAYLOAD, SIZE, SLICE, FrameType, frame
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import Outgoing, SendChannel, State, choose
from p2pml.wire.shared import Shared

BATCH = 1 << 16
"""Bytes of small messages that are joined into one write."""
MAX_CHANNELS = 1024
_DATA = int(FrameType.DATA)
MAX_NAME = 128


class Sender:
    """Takes messages, and CREDIT, ACCEPT and REFUSE for them; tells `MessageDelivered`, `MessageFailed`, `CreditAvailable`."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.link = SendWindow()
        self.slice_size = SLICE
        self.max_message: int | None = None
        self.sent: list[Outgoing] = []
        self.batch: list[bytes] = []
        self.busy: list[SendChannel] = []
        self.batched = 0
        self._by_name: dict[str, SendChannel] = {}
        self._by_number: dict[int, SendChannel] = {}
        self._preferences: dict[str, ChannelOptions] = {}
        self._clocks: dict[int, float] = {}

    # ----------------------------------------------------------------------------------------------------- channels

    def prefer(self, name: str, options: ChannelOptions) -> None:
        """Use this priority and weight for what is sent on a channel of this name."""
        self._preferences[name] = options
        channel = self._by_name.get(name)
        if channel is not None:
            channel.priority, channel.weight = options.priority, options.weight

    def announced(self, number: int, name: str, messages: int, size: int, eager: int) -> None:
        """The other side has a channel. Raises `ProtocolError` if it had it otherwise before."""
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ProtocolError("the peer opened a channel with an empty, overlong or unprintable name")
        known = self._by_number.get(number)
        channel = self._channel(name)
        if known is None:
            if channel.id or len(self._by_number) >= MAX_CHANNELS:
                raise ProtocolError(f"the peer opened channel '{name}' twice, or more than {MAX_CHANNELS} channels")
            channel.id, channel.eager = number, min(eager, MAX_PAYLOAD)
            self._by_number[number] = channel
        elif known is not channel:
            raise ProtocolError(f"the peer gave number {number} to channels '{known.name}' and '{name}'")
        self._raise_limits(channel, messages, size)

    def _raise_limits(self, channel: SendChannel, messages: int, size: int) -> None:
        channel.starved = channel.starved or channel.messages.available <= 0
        channel.messages.raise_to(messages)
        channel.bytes.raise_to(size)
        if channel.queue:
            self._offer(channel)
        else:
            self._relieve(channel)

    def _relieve(self, channel: SendChannel) -> None:
        """Say so if a channel that could take nothing, or was found so by `can_send`, can take something now."""
        if channel.starved and channel.credit_for(1) and self.link.available > 0:
            channel.starved = False
            self._shared.events.append(events.CreditAvailable(channel.name))

    def _channel(self, name: str) -> SendChannel:
        channel = self._by_name.get(name)
        if channel is None:
            mine = self._preferences.get(name, ChannelOptions())
            channel = self._by_name[name] = SendChannel(0, name, 0, 0, 0, mine.priority, mine.weight)
        return channel

    def channel(self, name: str) -> SendChannel | None:
        """The channel of this name, for its figures; None if nothing is known of it."""
        return self._by_name.get(name)

    @property
    def names(self) -> list[str]:
        """The channels that the other side has opened."""
        return [channel.name for channel in self._by_number.values()]

    def opened(self) -> None:
        """The handshake is complete: offer what waits."""
        for channel in self.busy:
            self._offer(channel)

    def close(self, error: P2PMLError) -> None:
        """Fail all that has not arrived."""
        for channel in self._by_name.values():
            under_way = [message for message in channel.unacknowledged if message.state is State.SENT]
            for message in [*channel.queue, *under_way]:
                self._failed(message, error)
            channel.queue.clear()
            channel.offered.clear()
            channel.unacknowledged.clear()
        self.busy.clear()
        self.batch.clear()

    def _failed(self, message: Outgoing, error: P2PMLError) -> None:
        message.state = State.FAILED
        self._shared.events.append(events.MessageFailed(message, error))

    # ------------------------------------------------------------------------------------------------------ sending

    def send(self, name: str, message: Outgoing) -> None:
        """Queue a message. Raises `MessageTooLarge` for what the other side would refuse."""
        if self.max_message is not None and message.whole > self.max_message:
            raise MessageTooLarge(f"a message of {message.whole} bytes: the peer takes at most {self.max_message}")
        channel = self._channel(name)
        if not channel.queue:
            self.busy.append(channel)
        channel.queue.append(message)
        self._offer(channel)

    def send_small(self, name: str, head: bytes, payload: bytes | memoryview) -> bool:
        """Put a whole message into the next batch, if nothing stands before it and it has credit; its bytes are copied."""
        channel = self._by_name.get(name)
        if channel is None or channel.queue or self.batched >= BATCH or not self._shared.open or self._shared.control:
            return (
                False  # the batch goes before the control frames, of which one may be the offer of an earlier message
            )
        charge = len(head) + len(payload)
        messages, size, link = channel.messages, channel.bytes, self.link
        if (
            charge > channel.eager
            or messages.sent >= messages.limit
            or size.sent + charge > size.limit
            or link.sent + charge > link.limit
        ):
            return False
        sequence = channel.next
        channel.next = sequence + 1
        messages.sent += 1
        size.sent += charge
        link.sent += charge
        self.batch.append(HEADER.pack(_DATA, FIRST | LAST, len(head), channel.id, len(payload), sequence & 0xFFFFFFFF))
        if head:
            self.batch.append(head)
        self.batch.append(payload if type(payload) is bytes else bytes(payload))
        self.batched += charge
        self._shared.messages_out += 1
        return True

    def can_send(self, name: str, charge: int) -> bool:
        """Whether a message of this size would start at once, as far as this channel and the link are concerned.

        If not, `CreditAvailable` follows when it is worth asking again.
        """
        channel = self._by_name.get(name)
        if channel is None or not channel.id or not self._shared.open:
            return False
        need = 0 if charge > channel.eager else charge
        can = not channel.queue and channel.credit_for(need) and self.link.available >= need
        channel.starved = channel.starved or not can
        return can

    def supersede(self, name: str, key: str) -> None:
        """Drop the waiting messages with this key."""
        channel = self._by_name.get(name)
        if channel is None:
            return
        for message in [item for item in channel.queue if item.key == key and item.state is State.WAITING]:
            channel.queue.remove(message)
            self._failed(message, MessageError("superseded by a newer message"))
        self._settle(channel)

    def cancel(self, owner: object) -> bool:
        """Take back the message of this owner; false if all of it has been handed out already."""
        for channel in self.busy:
            for message in channel.queue:
                if message.owner is owner:
                    self._cancel(channel, message)
                    return True
        return False

    def _cancel(self, channel: SendChannel, message: Outgoing) -> None:
        channel.queue.remove(message)
        if message.sequence >= 0:
            channel.forget(message)
            reset = frame(FrameType.RESET, channel=channel.id, sequence=message.sequence)
            self._shared.control.append(reset)
        message.state = State.FAILED
        self._settle(channel)

    def _settle(self, channel: SendChannel) -> None:
        """After messages were taken out of a queue."""
        if channel.queue:
            self._offer(channel)
        elif channel in self.busy:
            self.busy.remove(channel)
            self._relieve(channel)

    def _offer(self, channel: SendChannel) -> None:
        """Offer the large messages at the front of a queue, as far as the credit reaches."""
        if not channel.id or not self._shared.open:
            return
        while (message := channel.next_offer()) is not None and self.link.available >= len(message.head):
            channel.number(message)
            channel.bytes.charge(len(message.head))
            self.link.charge(len(message.head))
            channel.offered[message.sequence] = message
            message.state = State.OFFERED
            size = SIZE.pack(message.size)
            offer = frame(FrameType.OFFER, 0, channel.id, message.sequence, message.head, size)
            self._shared.control.append(offer)

    # ------------------------------------------------------------------------------------------------------ answers

    def _sending(self, number: int) -> SendChannel:
        try:
            return self._by_number[number]
        except KeyError:
            raise ProtocolError(f"the peer speaks of a channel {number} that it never opened") from None

    def link_limit_received(self, limit: int) -> None:
        """The other side takes more bytes on the link."""
        if self.link.raise_to(limit):
            for channel in self._by_name.values():
                if channel.queue:
                    self._offer(channel)
                else:
                    self._relieve(channel)

    def limits_received(self, number: int, messages: int, size: int, complete: int) -> None:
        """A channel's limits, and how many of its messages are complete on the other side."""
        channel = self._sending(number)
        if complete > channel.next:
            raise ProtocolError(f"channel '{channel.name}': {complete} messages acknowledged, {channel.next} sent")
        for message in channel.acknowledged(complete):
            if message.state is not State.SENT:
                raise ProtocolError(
                    f"channel '{channel.name}': message {message.sequence} acknowledged before it was sent"
                )
            message.state = State.DELIVERED
            self._shared.events.append(events.MessageDelivered(message))
        self._raise_limits(channel, messages, size)

    def accepted(self, number: int, sequence: int) -> None:
        """The other side has memory for an offered message."""
        message = self._sending(number).offered.get(sequence)
        if message is None:
            return  # it was cancelled, and the RESET is on its way
        if message.state is not State.OFFERED:
            raise ProtocolError(f"message {sequence} was accepted twice")
        message.state = State.ACCEPTED

    def refused(self, number: int, sequence: int, reason: str) -> None:
        """The other side does not take a message."""
        channel = self._sending(number)
        error = MessageRefused(f"the peer refused a message on '{channel.name}': {reason}")
        message = channel.offered.get(sequence)
        if message is not None:
            if message.state is State.SENDING:
                raise ProtocolError(f"channel '{channel.name}': message {sequence} refused halfway")
            channel.queue.remove(message)
        else:
            message = next((item for item in channel.unacknowledged if item.sequence == sequence), None)
        if message is None:
            self._shared.events.append(events.MessageDiscarded(channel.name, error))
            return
        channel.forget(message)
        self._failed(message, error)
        self._settle(channel)

    # ------------------------------------------------------------------------------------------------------- output

    def pull_batch(self, out: list[Any]) -> None:
        """Append the small messages that were put together by `send_small`."""
        out.append(b"".join(self.batch))
        self.batch.clear()
        self.batched = 0

    def pull(self, out: list[Any]) -> None:
        """Append the next frames of queued messages: a batch of small ones, or one large."""
        size = 0
        while self.busy and size < BATCH:
            channel = choose(self.busy, self.link, self._clocks)
            if channel is None:
                break
            count, message = channel.fragment(self.link, self.slice_size, out)
            size += count
            if message is not None:
                self._shared.messages_out += 1
                self.sent.append(message)
                self._settle(channel)
        self._say_blocked(out)

    def _say_blocked(self, out: list[Any]) -> None:
        """Tell the other side, once for each limit, where this side waits for credit."""
        for channel in self.busy:
            if channel.id and channel.queue[0].state is State.WAITING and not channel.ready(self.link):
                at = (channel.messages.limit, channel.bytes.limit + self.link.limit)
                if channel.blocked_at != at:
                    channel.blocked_at = at
                    out.append(frame(FrameType.BLOCKED, channel=channel.id))
