"""The sending half of a session: messages waiting for credit, and whose turn it is. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from p2pml.wire.credits import SendWindow
from p2pml.wire.framing import FIRST, HEADER, LAST, MAX_PAYLOAD, FrameType

_JOIN = 1 << 14
"""Pieces below this size are joined into one write: copying them is cheaper than another call."""


class State(Enum):
    """The life of an outgoing message."""

    WAITING = auto()
    OFFERED = auto()
    ACCEPTED = auto()
    SENDING = auto()
    SENT = auto()
    DELIVERED = auto()
    FAILED = auto()


class Outgoing:
    """One message on its way out. Its segments are its tensors' own memory, and must not change until it is `SENT`."""

    __slots__ = (
        "_index",
        "_offset",
        "charge",
        "head",
        "key",
        "owner",
        "packed",
        "remaining",
        "segments",
        "sequence",
        "size",
        "state",
        "tracked",
        "whole",
    )

    def __init__(
        self,
        head: bytes,
        segments: list[memoryview],
        *,
        owner: Any = None,
        key: str | None = None,
        tracked: bool = False,
        raw: int | None = None,
    ) -> None:
        """`raw` is the uncompressed size of a compressed message, which is always offered first, whatever its size."""
        self.head = head
        self.segments = segments
        self.size = sum(map(len, segments))
        self.remaining = self.size
        self.charge = len(head) + self.size
        self.packed = raw is not None
        self.whole = max(self.charge, raw or 0)
        self.owner = owner
        self.key = key
        self.tracked = tracked
        self.state = State.WAITING
        self.sequence = -1
        self._index = 0
        self._offset = 0

    def pieces(self, limit: int) -> Iterator[memoryview]:
        """The next at most `limit` bytes of the payload, as views."""
        while limit and self.remaining:
            segment = self.segments[self._index]
            piece = segment[self._offset : self._offset + limit]
            if not piece:
                self._index, self._offset = self._index + 1, 0
                continue
            self._offset += len(piece)
            self.remaining -= len(piece)
            limit -= len(piece)
            yield piece

    def release(self) -> None:
        """Let go of the tensors."""
        self.segments = []


class SendChannel:
    """A channel of the other side: its windows and the queue of messages for it."""

    __slots__ = (
        "blocked_at",
        "bytes",
        "eager",
        "id",
        "messages",
        "name",
        "next",
        "offered",
        "priority",
        "queue",
        "served",
        "starved",
        "unacknowledged",
        "weight",
    )

    def __init__(
        self, number: int, name: str, messages: int, size: int, eager: int, priority: int, weight: int
    ) -> None:
        self.id = number
        self.name = name
        self.eager = eager
        self.priority = priority
        self.weight = weight
        self.messages = SendWindow(messages)
        self.bytes = SendWindow(size)
        self.queue: deque[Outgoing] = deque()
        self.offered: dict[int, Outgoing] = {}
        self.unacknowledged: deque[Outgoing] = deque()
        self.next = 0
        self.served = 0.0
        self.blocked_at = (-1, -1)
        self.starved = False

    def number(self, message: Outgoing) -> int:
        """Give the message its place in the channel's order, and charge its message credit."""
        message.sequence = self.next & 0xFFFFFFFF
        self.next += 1
        self.messages.charge(1)
        if message.tracked:
            self.unacknowledged.append(message)
        return message.sequence

    def acknowledged(self, complete: int) -> list[Outgoing]:
        """The tracked messages among the first `complete` of this channel, which are taken off the list."""
        found = []
        while self.unacknowledged:
            behind = (self.next - self.unacknowledged[0].sequence) & 0xFFFFFFFF
            if self.next - behind >= complete:
                break
            found.append(self.unacknowledged.popleft())
        return found

    def forget(self, message: Outgoing) -> None:
        """Expect no answer for this message."""
        self.offered.pop(message.sequence, None)
        if message in self.unacknowledged:
            self.unacknowledged.remove(message)

    def is_large(self, message: Outgoing) -> bool:
        """Whether the message must be offered first."""
        return message.charge > self.eager or message.packed

    def credit_for(self, charge: int) -> bool:
        """Whether a message of this charge (0: a large one, which needs message credit only) could start now."""
        return self.messages.available > 0 and self.bytes.available >= charge

    def next_offer(self) -> Outgoing | None:
        """The next message to offer: a large one with only offered ones in front of it, and credit for its head."""
        for message in self.queue:
            if message.state is State.WAITING:
                if self.is_large(message) and self.messages.available > 0 and self.bytes.available >= len(message.head):
                    return message
                return None
        return None

    def ready(self, link: SendWindow) -> bool:
        """Whether the message in front can send a fragment now."""
        message = self.queue[0]
        if message.state is State.WAITING:
            return not self.is_large(message) and self.credit_for(message.charge) and link.available >= message.charge
        return message.state is State.ACCEPTED or message.state is State.SENDING

    def fragment(self, link: SendWindow, slice_size: int, out: list[bytes | memoryview]) -> tuple[int, Outgoing | None]:
        """Append the next frame to `out`; returns its size, and the message if that was its last. `ready` was true.

        An offered message is cut into payloads of `slice_size`; another is one frame.
        """
        message = self.queue[0]
        flags, head = 0, b""
        if message.state is State.WAITING:
            flags, head, slice_size = FIRST, message.head, MAX_PAYLOAD
            self.number(message)
            self.bytes.charge(message.charge)
            link.charge(message.charge)
        elif message.state is State.ACCEPTED:
            flags = FIRST
        message.state = State.SENDING
        length = min(message.remaining, slice_size)
        done = length == message.remaining
        if done:
            flags |= LAST
        out.append(HEADER.pack(FrameType.DATA, flags, len(head), self.id, length, message.sequence) + head)
        out.extend(message.pieces(length))
        size = HEADER.size + len(head) + length
        self.served += size / self.weight
        if not done:
            return size, None
        self.queue.popleft()
        self.offered.pop(message.sequence, None)
        message.state = State.SENT
        return size, message


def join_small(pieces: list[bytes | memoryview]) -> list[bytes | memoryview]:
    """The same bytes with small neighbours joined, so that each item is worth a write of its own."""
    if len(pieces) == 1:
        return pieces
    joined: list[bytes | memoryview] = []
    run: list[bytes | memoryview] = []
    for piece in pieces:
        if len(piece) < _JOIN:
            run.append(piece)
            continue
        if run:
            joined.append(b"".join(run))
            run = []
        joined.append(piece)
    if run:
        joined.append(b"".join(run))
    return joined


def choose(channels: list[SendChannel], link: SendWindow, clocks: dict[int, float]) -> SendChannel | None:
    """The channel whose turn it is: the lowest priority number that can send, then the least served for its weight.

    `served` is a virtual time (bytes / weight), as in start-time fair queueing (Goyal et al., SIGCOMM 1996), so no channel
    can starve another of its priority. `clocks` has the time of each priority, at which its last frame started: a channel
    that was idle, or had no credit, goes on from there, for it earned nothing by that.
    """
    best, first = None, (0, 0.0)
    for channel in channels:
        turn = (channel.priority, max(channel.served, clocks.get(channel.priority, 0.0)))
        if (best is None or turn < first) and channel.ready(link):
            best, first = channel, turn
    if best is not None:
        best.served = clocks[best.priority] = first[1]
    return best
