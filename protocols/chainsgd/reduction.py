"""One device's part in a round: it merges segments, passes them on, and gets the result back. It knows no roles and no
agent.

Segments of one sender come in order, so a counter for each sender says what it has sent, and one for this device what
it has passed on: segment s goes on as soon as all senders and the own contribution are past s. So the reduction is
pipelined through any chain of devices, and so is the way back.

A large segment is received straight into the accumulator if it is the first in its place. Memory that was given to the
wire so is claimed until that message arrives or its sender is gone, even if the attempt is aborted meanwhile; what else
is to go there waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from p2pml.errors import MessageError
from p2pml.protocols.chainsgd.broadcast import subtrees
from p2pml.protocols.chainsgd.messages import Result, Segment
from p2pml.protocols.training.merge import Accumulator, Unusable, check_weight
from p2pml.protocols.training.segments import Array, BoundTensors, SegmentMap
from p2pml.statemachine import Effect, Send, SetTimer
from p2pml.wire.codec import Head

PUMP = "chainsgd pump"
"""The timer by which a long run of segments gives others a turn; when it fires, call `Reduction.pump`."""
BATCH = 16
"""Segments that are passed on in one turn: of 1 MiB each, a few milliseconds of work."""

Stamp = tuple[int, int]
"""Round and attempt; see `messages`."""


class Misbehaved(Exception):
    """A peer sent what it may not send; the message says what."""


class Refusal(Exception):
    """A contribution cannot be used: that of `peer`, or this device's own if that is empty."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


@dataclass(frozen=True, slots=True)
class Claim:
    """Which message the memory of a segment was given away for."""

    peer: str
    kind: type
    stamp: Stamp


class Reduction:
    """The accumulator, and where this device is in the current attempt, whose `stamp` is (round, attempt).

    complete: the accumulator holds the whole result of the round. weight: its Σθ.

    Methods that yield effects raise `Refusal`; after it, nothing but the next attempt makes sense.
    """

    def __init__(self, me: str, segments: SegmentMap) -> None:
        self.me = me
        self.segments = segments
        self.accumulator = Accumulator(segments)
        self.stamp: Stamp = (0, 0)
        self.complete = False
        self.weight = 0.0
        self._claims: dict[int, Claim] = {}
        self._clear()

    def _clear(self) -> None:
        self._running = False
        self._cut: set[str] = set()
        self._senders: dict[str, int] = {}  # how many segments each has sent
        self._open = False  # whether others may turn out to be senders, too
        self._own: tuple[BoundTensors, float] | None = None
        self._receiver = ""
        self._is_root = False
        self._passed = 0  # segments that are merged, and sent on or finished
        self._source = ""  # who sends the result
        self._children: list[list[str]] = []
        self._here = 0  # segments of the result that have come, or are finished
        self._forwarded = 0
        self._waiting: list[tuple[str, Segment | Result]] = []  # for memory that is claimed

    # ----------------------------------------------------------------------------------------------------- attempts

    def begin(self, stamp: Stamp) -> None:
        """Begin an attempt, unless it has begun. Until `plan` is called, segments may come from anybody."""
        if stamp != self.stamp or not self._running:
            self._clear()
            self.stamp, self.complete, self._running, self._open = stamp, False, True, True
            self.accumulator.reset()

    def abort(self) -> None:
        """Drop the attempt; what belongs to it is ignored from now on. A result that is complete stays."""
        self._clear()

    def skip(self, stamp: Stamp) -> None:
        """An attempt in which this device, which has the result, does nothing."""
        self._clear()
        self.stamp = stamp

    def hold(self, bound: BoundTensors) -> None:
        """Take this device's own model for the result. Raises `Unusable`."""
        self._clear()
        self.accumulator.reset()
        for index in range(len(self.segments)):
            self.accumulator.add_own(index, bound, 1.0)
        self.complete, self.weight = True, 1.0

    def serve(self, stamp: Stamp, tree: Sequence[str]) -> Iterator[Effect]:
        """Send the result, which is complete here, to the others of `tree`."""
        self.skip(stamp)
        self._children, self._here, self._running = subtrees(tree), len(self.segments), True
        yield from self.pump()

    def plan(self, senders: Sequence[str], *, final: bool) -> Iterator[Effect]:
        """These send to this device; `final`: and no others, except that `send_to` and `be_root` say so later."""
        for sender in senders:
            self._senders.setdefault(sender, 0)
        self._open = not final
        strangers = self._senders.keys() - set(senders)
        if strangers and final:
            raise Refusal(min(strangers), "it sent segments that the plan has not")
        yield from self.pump()

    def send_to(self, receiver: str) -> Iterator[Effect]:
        """What is merged goes to `receiver`; all senders are known now."""
        self._receiver, self._open = receiver, False
        yield from self.pump()

    def be_root(self, tree: Sequence[str]) -> Iterator[Effect]:
        """The result is finished here and goes down `tree`; all senders are known now."""
        self._is_root, self._children, self._open = True, subtrees(tree), False
        yield from self.pump()

    def contribute(self, bound: BoundTensors, weight: float) -> Iterator[Effect]:
        """The own contribution, which must not change until the round is over."""
        self._own = (bound, weight)
        yield from self.pump()

    # ----------------------------------------------------------------------------------------------------- receiving

    def place(self, peer: str, head: Head) -> list[memoryview] | None:
        """Where the segment that `head` announces goes. Raises `MessageError` for one that has no use here."""
        stamp, index = (head.fields["round"], head.fields["attempt"]), head.fields["index"]
        if stamp != self.stamp or not self._running:
            raise MessageError(f"{head.kind}: attempt {stamp} is over")
        if not 0 <= index < len(self.segments) or head.specs != [self.segments.segments[index].spec]:
            raise MessageError(f"{head.kind}: segment {index} is not {head.specs}")
        if index in self._claims or (head.type is Segment and not self.accumulator.empty[index]):
            return None
        if head.type is Result and (self._is_root or index < self._here):
            return None
        self._claims[index] = Claim(peer, head.type, stamp)
        return [self.accumulator.tensors[index].data]

    def forget(self, peer: str) -> Iterator[Effect]:
        """The link to `peer` is gone: it no longer writes to memory that it was given, and what it sent is not whole.

        Should it come back before the attempt is aborted, what it sends then has a gap, and is ignored.
        """
        self._cut.add(peer)
        for index in [index for index, claim in self._claims.items() if claim.peer == peer]:
            del self._claims[index]
            yield from self._freed(index)

    def arrived(self, peer: str, message: Segment | Result) -> Iterator[Effect]:
        """A segment came. Raises `Misbehaved` as well, in which case it changed nothing but its place in memory."""
        stamp = (message.round, message.attempt)
        placed = self._claims.get(message.index) == Claim(peer, type(message), stamp)
        if placed:
            del self._claims[message.index]
        if stamp == self.stamp and self._running and peer not in self._cut:
            self._count(peer, message)
            self._take(peer, message, placed=placed)
        if placed:
            yield from self._freed(message.index)
        else:
            yield from self.pump()

    def _freed(self, index: int) -> Iterator[Effect]:
        """The memory of a segment is this device's again."""
        waiting = [entry for entry in self._waiting if entry[1].index == index]
        self._waiting = [entry for entry in self._waiting if entry[1].index != index]
        for peer, message in waiting:
            self._take(peer, message, placed=False)
        yield from self.pump()

    def _count(self, peer: str, message: Segment | Result) -> None:
        """Check that a message is what is due from this peer, and count it. Raises `Misbehaved`."""
        index = message.index
        if not 0 <= index < len(self.segments) or message.data.spec != self.segments.segments[index].spec:
            raise self._fault(message, f"is {message.data.spec}, which is no segment of the model")
        try:
            check_weight(message.weight)
        except ValueError as error:
            raise self._fault(message, str(error)) from error
        if type(message) is Segment:
            due = self._senders.get(peer, 0 if self._open else -1)
        elif self._is_root or (self._source and peer != self._source):
            due = -1
        else:
            due = self._here
        if due < 0:
            raise self._fault(message, "was not to be sent here")
        if index != due:
            raise self._fault(message, f"came where {due} was due")
        if type(message) is Segment:
            self._senders[peer] = due + 1
            return
        assert isinstance(message, Result)
        if index == 0:
            if message.subtree[:1] != [self.me]:
                raise self._fault(message, f"is for the tree of {message.subtree[:1]}")
            self._children = subtrees(message.subtree)
        self._here, self._source, self.weight = due + 1, peer, message.weight

    def _fault(self, message: Segment | Result, what: str) -> Misbehaved:
        return Misbehaved(f"{type(message).__name__.lower()} {message.index} of attempt {self.stamp} {what}")

    def _take(self, peer: str, message: Segment | Result, *, placed: bool) -> None:
        """Merge or store a message that was counted."""
        index, accumulator = message.index, self.accumulator
        if index in self._claims:
            self._waiting.append((peer, message))
            return
        try:
            if isinstance(message, Result):
                accumulator.store(index, None if placed else self._array(message), message.weight)
            elif placed:
                accumulator.adopt(index, message.weight)
            else:
                accumulator.add(index, self._array(message), message.weight)
        except Unusable as error:
            raise Refusal(peer if error.received else "", str(error)) from error

    def _array(self, message: Segment | Result) -> Array:
        return np.frombuffer(message.data.data, self.segments.segments[message.index].group.stored)

    # ------------------------------------------------------------------------------------------------------- sending

    def pump(self) -> Iterator[Effect]:
        """Pass on what is due, up to `BATCH` segments up and down; the timer `PUMP` asks for the next turn."""
        if not self._running:
            return
        last = len(self.segments)
        if self._own is not None and (self._receiver or self._is_root):
            until = min(self._senders.values(), default=last)
            until = min(until, self._passed + BATCH)
            while self._passed < until and self._passed not in self._claims:
                try:
                    yield from self._pass(self._passed, *self._own)
                except Unusable as error:
                    raise Refusal("", str(error)) from error
                self._passed += 1
        until = min(self._here, self._forwarded + BATCH)
        while self._forwarded < until and self._forwarded not in self._claims:
            yield from self._forward(self._forwarded)
            self._forwarded += 1
        if self._forwarded == last:
            self.complete = True
        if self._has_more():
            yield SetTimer(PUMP, 0.0)

    def _has_more(self) -> bool:
        up = self._own is not None and bool(self._receiver or self._is_root)
        more_up = up and self._passed < min(self._senders.values(), default=len(self.segments))
        more_down = self._forwarded < self._here
        return (more_up and self._passed not in self._claims) or (more_down and self._forwarded not in self._claims)

    def _pass(self, index: int, bound: BoundTensors, weight: float) -> Iterator[Effect]:
        accumulator = self.accumulator
        if self._is_root:
            accumulator.add_own(index, bound, weight)
            self.weight = accumulator.weights[index]
            accumulator.finish(index)
            self._here = index + 1
            return
        tensor = accumulator.own(index, bound, weight) if accumulator.empty[index] else None
        if tensor is None:
            accumulator.add_own(index, bound, weight)
            tensor, weight = accumulator.tensors[index], accumulator.weights[index]
        yield Send(self._receiver, Segment(*self.stamp, index, weight, tensor), "segment")

    def _forward(self, index: int) -> Iterator[Effect]:
        tensor = self.accumulator.tensors[index]
        for subtree in self._children:
            message = Result(*self.stamp, index, self.weight, tensor, subtree if index == 0 else [])
            yield Send(subtree[0], message, "result")
