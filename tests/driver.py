"""Runs several state machines in memory, in virtual time, in an order drawn from a seed.

A `Cluster` is to machines what `p2pml.host` is on real links, without the links: every step one thing happens, chosen at
random among all that may happen next. Messages keep their order only within (sender, receiver, channel), computations
only within a lane, and a peer's own events among themselves, so a seed is one of the interleavings that a network allows,
and the same seed is always the same one::

    cluster = Cluster({"a": PingPong(), "b": PingPong()}, seed=1)
    cluster.run(until=lambda: cluster.finished("a"))
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

from p2pml import statemachine as sm
from p2pml.errors import MachineFailed, MessageError
from p2pml.wire import codec
from p2pml.wire.options import ChannelOptions

GOODBYE = 1.0
"""Seconds in which messages of a finished machine may still wait for credit."""
Memory = Literal["checked", "late", "early"]
CLOSED = ChannelOptions(messages=0)


class Stuck(AssertionError):
    """Nothing can happen any more, or too much did, before what `Cluster.run` waited for."""


class MemoryReused(AssertionError):
    """A tensor changed between its `Send` and the driver's `Sent`."""


@dataclass
class Answer:
    """What a `Command` will be answered with."""

    done: bool = False
    value: Any = None

    def result(self) -> Any:
        """The value of the `Reply`; raises it if it is an exception, `LookupError` if there is none yet."""
        if not self.done:
            raise LookupError("no Reply yet")
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class _Parcel:
    """One message under way."""

    def __init__(self, send: sm.Send, wire: bool, memory: Memory) -> None:
        self.send, self.message, self.tag, self.memory = send, send.message, send.tag, memory
        self.buffers: list[memoryview] = []
        self.encoded = codec.encode(send.message) if wire else None
        if self.encoded is not None:
            if memory == "early":
                self.encoded.segments = [memoryview(bytes(segment)) for segment in self.encoded.segments]
            self.checksum = self._checksum()

    def _checksum(self) -> int:
        assert self.encoded is not None
        return crc32(b"".join(self.encoded.segments)) if self.memory == "checked" else 0

    def place(self, receiver: _Peer, placed: bool, rng: random.Random) -> None:
        """Choose the memory that it arrives in, the machine's own if `placed`, and receive a part of it."""
        if self.encoded is None:
            return
        self.head = codec.decode_head(self.encoded.head, max_message=1 << 40)
        method = receiver.machine._places.get(self.head.type) if placed and not receiver.machine.finished else None
        found = getattr(receiver.machine, method)(receiver.name_of(self), self.head) if method is not None else None
        sizes = [spec.nbytes for spec in self.head.specs]
        if found is None:
            self.buffers = [memoryview(bytearray(size)) for size in sizes]
        else:
            self.buffers = [memoryview(buffer).cast("B") for buffer in found]
            if [len(buffer) for buffer in self.buffers] != sizes or any(buffer.readonly for buffer in self.buffers):
                raise ValueError(f"the place for {self.head.kind} is not writable memory of {sizes} bytes")
        self._copy([rng.randint(0, size) for size in sizes])

    def open(self) -> Any:
        """The message as it arrives."""
        if self.encoded is None:
            return self.message
        if self._checksum() != self.checksum:
            raise MemoryReused(f"a tensor of {_describe(self.message)} to {self.send.peer} changed before it was sent")
        self._copy(list(map(len, self.buffers)))
        return codec.build(self.head, self.buffers)

    def _copy(self, sizes: list[int]) -> None:
        assert self.encoded is not None
        for target, source, size in zip(self.buffers, self.encoded.segments, sizes, strict=True):
            target[:size] = source[:size]


class _Peer:
    """A machine and what its driver keeps for it."""

    def __init__(self, cluster: Cluster, name: str, machine: sm.StateMachine) -> None:
        self.cluster, self.name, self.machine = cluster, name, machine
        self.alive = True
        self.failure: MachineFailed | None = None
        self.pending: deque[tuple[sm.Event, int | None]] = deque()
        self.members: dict[str, None] = {}
        self.timers: dict[str, int] = {}
        self.lanes: dict[str, _Lane] = {}
        self.asked: dict[str, deque[Answer]] = {}

    @property
    def runs(self) -> bool:
        return self.alive and not self.machine.finished and self.failure is None

    def name_of(self, parcel: _Parcel) -> str:
        return parcel.send_from

    def feed(self, event: sm.Event, timer: int | None = None) -> None:
        if self.runs:
            self.pending.append((event, timer))
            self.cluster.wake(self.take_event)

    def take_event(self) -> bool:
        while self.pending:
            event, timer = self.pending.popleft()
            if isinstance(event, sm.TimerFired):
                if self.timers.get(event.name) != timer:
                    continue  # cancelled, or set anew, since it was due
                del self.timers[event.name]
            if isinstance(event, sm.PeerJoined):
                self.members[event.peer] = None
                self.cluster.wake_into(self.name, event.peer)
            if isinstance(event, sm.PeerLeft):
                self.members.pop(event.peer, None)
            self.cluster.handle(self, event)
            return True
        return False
