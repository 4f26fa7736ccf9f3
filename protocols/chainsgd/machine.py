"""One peer of a ChainSGD group: it hands in its model for each round, and gets the group's average back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pml.errors import P2PMLError
from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.device import Device
from p2pml.protocols.chainsgd.member import GroupEnd, entry
from p2pml.protocols.chainsgd.messages import (
    Done,
    Plan,
    Ready,
    Rejected,
    Void,
)
from p2pml.protocols.chainsgd.reduction import Reduction
from p2pml.protocols.chainsgd.schedule import Scheduler
from p2pml.protocols.training.errors import ModelMismatch, TrainingError
from p2pml.protocols.training.merge import Accumulator, Unusable, check_weight
from p2pml.protocols.training.segments import BoundTensors, SegmentMap
from p2pml.statemachine import (
    Command,
    Compute,
    Computed,
    Effect,
    Reply,
    on,
)
from p2pml.wire.options import ChannelOptions

INLINE = 1 << 20
"""A result of up to so many bytes is written into the model at once; a larger one by a worker thread."""
_APPLY = "chainsgd apply"


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a peer hands in. The tensors must not change until the answer.

    tensors: the model, alike in names, dtypes and shapes to the one that the machine was made with; None for that one.
    weight: θ of Eq. 3: 1, or for an average weighted by samples their number. in_place: write the result into these
    tensors; otherwise it is only lent, as `AverageResult.tensors`, until this peer's next 'average', without which the
    group begins no other round.
    """

    tensors: Mapping[str, Any] | None = None
    weight: float = 1.0
    in_place: bool = True


@dataclass(frozen=True, slots=True)
class AverageResult:
    """What a round gave. weight: Σθ of all contributions. counted: whether this peer's is among them; if not, the
    reason.

    tensors: the average as `p2pml.wire.tensors.Tensor`s by name, if it was not to be written in place.
    """

    round: int
    members: Sequence[str]
    weight: float
    counted: bool = True
    reason: str = ""
    tensors: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Offer:
    contribution: Contribution
    bound: BoundTensors


class ChainGroup(Device):
    """The machine of a peer, and of the mobile agent beside it in the peer that starts the group.

    Commands: 'joined' is answered, with the members, when this peer is one and has the group's model; 'average', given
    a `Contribution`, when the round is over, with an `AverageResult`, or raises `TrainingError` if the round has no
    result and `ModelMismatch` for other tensors; 'leave', with a `GroupEnd`, when the running round is over for this
    peer.

    tensors: the model, by names. agent: the peer id of the mobile agent; None for the peer that starts the group, whose
    model is the initial one. options, scheduler: the agent's count, `TreeScheduler` by default. addresses: where others
    can dial this peer. resources: how much it can take, compared with the others; who has more forwards more.

    Finishes with a `GroupEnd`.
    """

    name = "chainsgd"
    # Windows bound the memory of what is received and not yet merged: three children at most send to the root of eight.
    channels = {
        "control": ChannelOptions(priority=0),
        "segment": ChannelOptions(messages=8, queue=1 << 20),
        "result": ChannelOptions(messages=8, queue=1 << 20),
    }

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        agent: str | None = None,
        options: Options | None = None,
        scheduler: Scheduler | None = None,
        addresses: Sequence[str] = (),
        resources: float = 1.0,
    ) -> None:
        super().__init__(
            tensors, agent=agent, options=options, scheduler=scheduler, addresses=addresses, resources=resources
        )
        self.tensors = tensors
        self._bound: BoundTensors | None = None
        self._queue: deque[Contribution] = deque()
        self._offer: _Offer | None = None
        self._applying = False
        self._lent = False
        self._asked = 0  # unanswered 'joined' commands
        self._rejected = False

    # ----------------------------------------------------------------------------------------------------- subclasses

    def round_ended(self, result: AverageResult | P2PMLError) -> Iterator[Effect]:
        """A contribution is answered: the result is in the model, or there is none."""
        yield Reply("average", result)

    def write_result(self, accumulator: Accumulator, bound: BoundTensors) -> None:
        """Put what a round, or joining, gave into a model. If that is large, it is called by a worker thread."""
        for index, view in enumerate(accumulator.views):
            bound.scatter(index, view)
        bound.flush()

    def missed_result(self, accumulator: Accumulator) -> None:
        """A round is over, and this peer is not through with what it does for it. It will get the newest result then."""

    def became_member(self) -> Iterator[Effect]:
        """This peer is a member, and has the group's model."""
        while self._asked:
            self._asked -= 1
            yield Reply("joined", list(self.members))

    def offer(self, contribution: Contribution) -> Iterator[Effect]:
        """Hand in a contribution, to the round under way or the next."""
        self._queue.append(contribution)
        yield from self._next_offer()

    def ended(self, end: GroupEnd) -> Iterator[Effect]:
        """It is over for this peer: what is not answered never will be."""
        for _ in range(self._asked):
            yield Reply("joined", ModelMismatch(end.reason) if self._rejected else TrainingError(end.reason))
        self._asked = 0
        unanswered = len(self._queue) + (self._offer is not None)
        self._queue.clear()
        self._offer = None
        for _ in range(unanswered):
            yield from self.round_ended(TrainingError(end.reason))
        yield from super().ended(end)

    # --------------------------------------------------------------------------------------------------------- events

    def told(self, message: Any) -> Iterator[Effect]:
        """The agent said something."""
        self._rejected = isinstance(message, Rejected)
        yield from super().told(message)

    @on("joined")
    @entry
    def _answer_joined(self, event: Command) -> Iterator[Effect]:
        self._asked += 1
        if self.joined:
            yield from self.became_member()

    @on("average")
    @entry
    def _average(self, event: Command) -> Iterator[Effect]:
        yield from self.offer(event.value)

    def took_part(self, segment_bytes: int) -> Iterator[Effect]:
        """The group is open to this peer."""
        self._bound = BoundTensors(SegmentMap(self._specs, segment_bytes), self.tensors)
        self.reduction = Reduction(self.me, self._bound.segments)
        if self._agent is not None:
            self.reduction.hold(self._bound)  # round 0: the initial model
            self.joined = self.applied = True
            yield from self.became_member()
            yield from self._next_offer()

    @on(Computed)
    @entry
    def computed(self, event: Computed) -> Iterator[Effect]:
        """A computation is done."""
        if event.tag == _APPLY:
            yield from self._have_applied(None)

    def voided(self, reduction: Reduction, message: Void) -> Iterator[Effect]:
        """The round has no result; the model stays what it is, and is what this peer can give to those who join."""
        self.plan = Plan(message.round, message.attempt, self.members, [], {}, [], [])
        reduction.skip(self.stamp)
        offer, self._offer, self.applied = self._offer, None, True
        holds = False
        if offer is not None:
            try:
                reduction.hold(offer.bound)
                holds = True
            except Unusable:
                reduction.abort()  # nor can it be given to anybody
            yield from self.round_ended(TrainingError(message.reason))
        self.settled = (self.stamp, True)
        yield self.tell(Done(*self.stamp, 0.0, True, holds))
        yield from self._next_offer()

    # --------------------------------------------------------------------------------------------- what the user gives

    def _next_offer(self) -> Iterator[Effect]:
        if self._offer is not None or not self._queue or not self.joined or self.reduction is None:
            return
        assert self._bound is not None
        contribution = self._queue.popleft()
        try:
            check_weight(contribution.weight)
            bound = self._bound
            if contribution.tensors is not None:
                bound = BoundTensors(self.reduction.segments, contribution.tensors)
            bound.refresh()
            if contribution.in_place:
                bound.require_writable()
        except (ModelMismatch, ValueError) as error:
            yield from self.round_ended(error if isinstance(error, P2PMLError) else TrainingError(str(error)))
            yield from self._next_offer()
            return
        self._offer = _Offer(contribution, bound)
        if self._lent:
            self._lent = False
            yield from self.settle()
        yield from self.contribute()
        yield from self.settle()

    def contribute(self) -> Iterator[Effect]:
        if self._offer is None or self.contributed or not self.running or self.me not in self.plan.contributors:
            return
        assert self.reduction is not None
        self.contributed = True
        weight = self._offer.contribution.weight
        yield self.tell(Ready(*self.stamp, weight))
        yield from self.guard(self.me, self.reduction.contribute(self._offer.bound, weight))

    def settle(self) -> Iterator[Effect]:
        """If the result is here, give it to whom it is for, then tell the agent."""
        reduction = self.reduction
        if reduction is None or not self.running or not reduction.complete or self._applying or self._lent:
            return
        if not self.applied and (self._offer is not None or not self.joined):
            bound = self._bound if self._offer is None else self._offer.bound
            assert bound is not None
            if self._offer is not None and not self._offer.contribution.in_place:
                self._lent = True
                yield from self._have_applied(reduction.accumulator.result())
            elif reduction.segments.nbytes <= INLINE:
                self.write_result(reduction.accumulator, bound)
                yield from self._have_applied(None)
            else:
                self._applying = True
                yield Compute(_APPLY, self.write_result, (reduction.accumulator, bound), lane="apply")
            return
        if self.settled != (self.stamp, self.applied):
            if not self.applied:
                self.missed_result(reduction.accumulator)
            self.settled = (self.stamp, self.applied)
            yield self.tell(Done(*self.stamp, reduction.weight, self.applied, True))

    def _have_applied(self, tensors: Mapping[str, Any] | None) -> Iterator[Effect]:
        assert self.reduction is not None
        self.applied, self._applying = True, False
        if self.joined:
            self._offer = None
            counted = not self.reason
            result = AverageResult(
                self.plan.round, tuple(self.members), self.reduction.weight, counted, self.reason, tensors
            )
            yield from self.round_ended(result)
        else:
            self.joined = True
            yield from self.became_member()
        yield from self.settle()
        yield from self._next_offer()
