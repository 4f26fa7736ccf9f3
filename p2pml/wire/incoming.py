"""The receiving half of a session: messages being put together, and the channels they come on. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from p2pml.errors import MessageError, MessageTooLarge, ProtocolError
from p2pml.wire import codec, compression
from p2pml.wire.credits import ReceiveWindow
from p2pml.wire.framing import DIRECT
from p2pml.wire.options import ChannelOptions
from p2pml.wire.tensors import allocate

Place = Callable[[str, codec.Head], Sequence[Any] | None]
"""Given a channel and the head of a large message: where its tensors go, or None for fresh memory."""


class Incoming:
    """One message whose payload is coming in: a `p2pml.wire.framing.Target` over the memory of its tensors."""

    __slots__ = (
        "_index",
        "_offset",
        "accepted",
        "buffers",
        "charge",
        "fault",
        "grant",
        "head",
        "offered",
        "remaining",
        "reserved",
        "sequence",
        "size",
    )

    def __init__(self, sequence: int, head: codec.Head | None, size: int, charge: int, *, offered: bool) -> None:
        self.sequence = sequence
        self.head = head
        self.size = size
        self.remaining = size
        self.charge = charge
        self.offered = offered
        self.reserved = 0
        self.accepted = False
        self.fault: MessageError | None = None
        self.grant: Callable[[], None] | None = None
        self.buffers: list[memoryview] = []
        self._index = 0
        self._offset = 0

    def take_memory(self, placed: list[memoryview] | None = None) -> None:
        """Allocate where the payload goes: one buffer for each tensor, of its size on the wire; or use the `placed` ones."""
        if self.head is None:
            self.buffers = [allocate(self.size)] if self.size else []
        elif placed is not None:
            self.buffers = placed
        else:
            self.buffers = [allocate(size) if size else memoryview(b"") for size in self.head.sizes]
        self._skip_full()

    def _skip_full(self) -> None:
        while self._index < len(self.buffers) and self._offset == len(self.buffers[self._index]):
            self._index, self._offset = self._index + 1, 0

    def direct(self, limit: int, more: int) -> memoryview | None:
        view, start = self.buffers[self._index], self._offset
        if len(view) - start >= limit + more:
            return view[start : start + limit + more]
        stop = min(len(view), start + limit)
        return view[start:stop] if stop - start >= DIRECT else None

    def advance(self, count: int) -> None:
        self._offset += count
        self.remaining -= count
        self._skip_full()

    def feed(self, data: memoryview) -> None:
        while data:
            view = self.buffers[self._index]
            count = min(len(data), len(view) - self._offset)
            view[self._offset : self._offset + count] = data[:count]
            data = data[count:]
            self.advance(count)

    def message(self) -> Any:
        """The finished message; for one without a head, its bytes."""
        if self.head is None:
            return self.buffers[0] if self.buffers else memoryview(b"")
        return codec.build(self.head, self.buffers)

    def drop_memory(self) -> None:
        """Let go of the buffers (they may be somebody's)."""
        self.buffers = []


class ReceiveChannel:
    """A channel on which this side receives: its windows, and the messages that are due, in order.

    Messages are numbered from 0 as their sender introduces them, by an offer or by their first fragment; `due` holds
    those that were introduced and are not complete. Only the first of them may send.
    """

    __slots__ = ("blocked", "bytes", "due", "eager", "id", "introduced", "messages", "name", "options", "told")

    def __init__(self, number: int, name: str, options: ChannelOptions) -> None:
        self.id = number
        self.name = name
        self.options = options
        self.eager = options.eager
        self.messages = ReceiveWindow(options.messages, manual=options.manual)
        self.bytes = ReceiveWindow(options.bytes)
        self.introduced = 0
        self.told = 0
        self.blocked = False
        self.due: deque[Incoming] = deque()

    def describe(self) -> list[Any]:
        """What the other side must know to send here: [id, name, message limit, byte limit, eager size]."""
        return [self.id, self.name, self.messages.limit, self.bytes.limit, self.options.eager]

    @property
    def complete(self) -> int:
        """How many messages, from the first on, have arrived whole, or were cancelled or refused: to acknowledge."""
        return self.introduced - (self.introduced - self.due[0].sequence & 0xFFFFFFFF) if self.due else self.introduced

    def _introduce(self, sequence: int) -> None:
        if sequence != self.introduced & 0xFFFFFFFF:
            raise ProtocolError(f"channel '{self.name}': message {sequence} came where {self.introduced} was due")
        self.messages.receive(1, f"channel '{self.name}', messages")
        self.introduced += 1

    def start(self, sequence: int, head: bytes, payload: int, max_message: int) -> Incoming:
        """A message that comes without an offer: check it against the windows and count it.

        Raises `ProtocolError` (order, credit, size); where only this message is at fault, `Incoming.fault` says so.
        """
        self._introduce(sequence)
        parsed, fault = self._parse(head, payload, max_message)
        charge = len(head) + (parsed.raw_size if parsed else payload)
        self.bytes.receive(charge, f"channel '{self.name}', bytes")
        if charge > self.options.eager:
            raise ProtocolError(f"channel '{self.name}': a message of {charge} bytes came without an offer")
        incoming = Incoming(sequence, parsed, payload, charge, offered=False)
        incoming.fault = fault
        return incoming

    def offer(self, sequence: int, head: bytes, payload: int, max_message: int) -> Incoming:
        """An offer: check and count it; its bytes will not count against the channel's window, but its head does.

        Raises `ProtocolError`; where only this message is at fault, `Incoming.fault` says so.
        """
        self._introduce(sequence)
        self.bytes.receive(len(head), f"channel '{self.name}', bytes")
        parsed, fault = self._parse(head, payload, max_message)
        incoming = Incoming(sequence, parsed, payload, len(head), offered=True)
        incoming.fault = fault
        return incoming

    @staticmethod
    def _parse(head: bytes, payload: int, max_message: int) -> tuple[codec.Head | None, MessageError | None]:
        if not head:
            too_large = payload > max_message
            return None, MessageTooLarge(f"a message of {payload} bytes (at most {max_message})") if too_large else None
        try:
            parsed = codec.decode_head(head, max_message=max_message)
        except MessageError as error:
            return None, error
        if parsed.wire_size != payload:
            return None, MessageError(
                f"{parsed.kind}: {payload} payload bytes, but its tensors have {parsed.wire_size}"
            )
        return parsed, None

    def find(self, sequence: int) -> Incoming | None:
        """The message with this number, if it is not complete."""
        return next((incoming for incoming in self.due if incoming.sequence == sequence), None)


def unpack(head: codec.Head, payload: Sequence[memoryview], placed: Sequence[memoryview] | None = None) -> Any:
    """Decompress a message's payload into its tensors' memory (slow: call it off the event loop). Raises `MessageError`."""
    targets = list(placed) if placed is not None else [allocate(spec.nbytes) for spec in head.specs]
    compression.unpack(head, payload, targets)
    return codec.build(head, targets)
