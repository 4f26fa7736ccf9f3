"""One peer of a ChainSGD group: it hands in its model for each round, and gets the group's average back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pml.errors import P2PMLError
from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.member import GroupEnd, Member, entry
from p2pml.protocols.chainsgd.messages import (
    Abort,
    Aborted,
    Accused,
    Done,
    Gone,
    Merged,
    Pair,
    Plan,
    Ready,
    Refused,
    Rejected,
    Result,
    Root,
    Segment,
    Stop,
    Void,
    Welcome,
)
from p2pml.protocols.chainsgd.reduction import PUMP, Misbehaved, Reduction, Refusal, Stamp
from p2pml.protocols.chainsgd.schedule import Scheduler
from p2pml.protocols.training.errors import ModelMismatch, TrainingError
from p2pml.protocols.training.merge import Accumulator, Unusable, check_weight
from p2pml.protocols.training.segments import BoundTensors, SegmentMap
from p2pml.statemachine import (
    Command,
    Compute,
    Computed,
    Effect,
    Received,
    Reply,
    TimerFired,
    on,
    place,
)
from p2pml.wire.codec import Head
from p2pml.wire.options import ChannelOptions

INLINE = 1 << 20
"""A result of up to so many bytes is written into the model at once; a larger one by a worker thread."""
_APPLY = "chainsgd apply"
_TO_DEVICE = (Welcome, Gone, Rejected, Stop, Plan, Pair, Root, Abort, Void)


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


class ChainGroup(Member):
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
        self.reduction: Reduction | None = None  # from the agent's welcome on
        self.joined = False  # this peer is a member, and has the group's model
        self._bound: BoundTensors | None = None
        self._plan = Plan(0, 0, [], [], {}, [], [])
        self._running = False  # the plan's attempt
        self._reason = ""  # why this peer's contribution does not count in this round
        self._queue: deque[Contribution] = deque()
        self._offer: _Offer | None = None
        self._contributed = False
        self._applied = False  # the result in the accumulator was given to whom it is for
        self._applying = False
        self._lent = False
        self._settled: tuple[Stamp, bool] | None = None  # what the last `Done` was for
        self._asked = 0  # unanswered 'joined' commands
        self._rejected = False

    # ----------------------------------------------------------------------------------------------------- subclasses

    def round_began(self, round_: int) -> Iterator[Effect]:
        """The group begins a round, to which this peer may contribute by `offer`."""
        yield from ()

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

    def prepare_model(self) -> None:
        """Between rounds: have the group's model in the accumulator, for those who join. As a rule it is there."""

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

    @on(*(Received[kind] for kind in _TO_DEVICE))  # type: ignore[valid-type]
    @entry
    def _hear_agent(self, event: Received[Any]) -> Iterator[Effect]:
        if event.peer == self.agent_id:
            yield from self.told(event.message)

    @place(Segment)
    def _place_segment(self, peer: str, head: Head) -> list[memoryview] | None:
        if self.reduction is None:
            return None
        self._foresee((head.fields["round"], head.fields["attempt"]))
        return self.reduction.place(peer, head)

    @place(Result)
    def _place_result(self, peer: str, head: Head) -> list[memoryview] | None:
        return self._place_segment(peer, head)

    @on(Received[Segment], Received[Result])
    @entry
    def _arrived(self, event: Received[Any]) -> Iterator[Effect]:
        peer, message, reduction = event.peer, event.message, self.reduction
        if reduction is None:
            return
        stamp = (message.round, message.attempt)
        self._foresee(stamp)
        yield from self._guard(peer, reduction.arrived(peer, message))
        is_last = message.index == len(reduction.segments) - 1
        if is_last and type(message) is Segment and not (self._plan.trees and stamp == self._stamp):
            yield self.tell(Merged(*stamp, peer))

    @on(TimerFired)
    @entry
    def fired(self, event: TimerFired) -> Iterator[Effect]:
        """A timer is due."""
        if event.name != PUMP:
            yield from super().fired(event)
        elif self.reduction is not None:
            yield from self._guard(self.me, self.reduction.pump())

    @on(Computed)
    @entry
    def computed(self, event: Computed) -> Iterator[Effect]:
        """A computation is done."""
        if event.tag == _APPLY:
            yield from self._have_applied(None)

    # -------------------------------------------------------------------------------------------------------- the agent

    @property
    def _stamp(self) -> Stamp:
        return (self._plan.round, self._plan.attempt)

    @property
    def last_round(self) -> int:
        """The round that this peer is in."""
        return self._plan.round

    def took_part(self, segment_bytes: int) -> Iterator[Effect]:
        """The group is open to this peer."""
        self._bound = BoundTensors(SegmentMap(self._specs, segment_bytes), self.tensors)
        self.reduction = Reduction(self.me, self._bound.segments)
        if self._agent is not None:
            self.reduction.hold(self._bound)  # round 0: the initial model
            self.joined = self._applied = True
            yield from self.became_member()
            yield from self._next_offer()

    def told(self, message: Any) -> Iterator[Effect]:
        """The agent said something."""
        reduction = self.reduction
        match message:
            case Plan() if reduction is not None and (message.round, message.attempt) > self._stamp:
                yield from self._planned(reduction, message)
            case Pair() | Root() | Abort() | Void() if reduction is not None:
                if (message.round, message.attempt) == self._stamp or isinstance(message, Void):
                    yield from self._told_more(reduction, message)
            case Rejected():
                self._rejected = True
                yield from super().told(message)
            case _:
                yield from super().told(message)

    def _planned(self, reduction: Reduction, plan: Plan) -> Iterator[Effect]:
        is_new = plan.round > self._plan.round
        self._plan, self._running, self._contributed = plan, True, False
        self.meet(plan.members)
        self.held.clear()
        if plan.contributors:
            self._applied, self._reason = False, plan.excluded.get(self.me, "")
            reduction.begin(self._stamp)
            senders = [sender for sender, receiver in plan.pairs if receiver == self.me]
            yield from self._guard(self.me, reduction.plan(senders, final=bool(plan.trees)))
            for sender, receiver in plan.pairs:
                if sender == self.me:
                    yield from self._guard(self.me, reduction.send_to(receiver))
            if plan.trees and plan.trees[0][0] == self.me:
                yield from self._guard(self.me, reduction.be_root(plan.trees[0]))
            if is_new:
                yield from self.round_began(plan.round)
            yield from self._contribute()
            return
        mine = next((tree for tree in plan.trees if self.me in tree), None)
        if mine is None:
            reduction.skip(self._stamp)
            yield from self._settle()
        elif mine[0] == self.me:
            if plan.joining:
                self.prepare_model()
            yield from self._guard(self.me, reduction.serve(self._stamp, mine))
        else:
            reduction.begin(self._stamp)
            yield from self._guard(self.me, reduction.plan([], final=True))

    def _told_more(self, reduction: Reduction, message: Pair | Root | Abort | Void) -> Iterator[Effect]:
        match message:
            case Pair() if self._running and message.receiver == self.me:
                yield from self._guard(self.me, reduction.plan([message.sender], final=False))
            case Pair() if self._running:
                yield from self._guard(self.me, reduction.send_to(message.receiver))
            case Root() if self._running:
                yield from self._guard(self.me, reduction.be_root(message.tree))
            case Abort():
                self._running = False
                reduction.abort()
                yield self.tell(Aborted(*self._stamp, reduction.complete))
            case Void():
                yield from self._voided(reduction, message)
            case _:
                return

    def _voided(self, reduction: Reduction, message: Void) -> Iterator[Effect]:
        """The round has no result; the model stays what it is, and is what this peer can give to those who join."""
        self._plan = Plan(message.round, message.attempt, self.members, [], {}, [], [])
        reduction.skip(self._stamp)
        offer, self._offer, self._applied = self._offer, None, True
        holds = False
        if offer is not None:
            try:
                reduction.hold(offer.bound)
                holds = True
            except Unusable:
                reduction.abort()  # nor can it be given to anybody
            yield from self.round_ended(TrainingError(message.reason))
        self._settled = (self._stamp, True)
        yield self.tell(Done(*self._stamp, 0.0, True, holds))
        yield from self._next_offer()

    def _foresee(self, stamp: Stamp) -> None:
        """A segment may overtake the plan of its attempt.

        The memory for it is free by then, or the agent had not planned.
        """
        reduction = self.reduction
        if reduction is None or stamp == reduction.stamp:
            return
        round_, attempt = self._stamp
        if not self._running:
            may = not reduction.complete and stamp == (round_, attempt + 1)
        else:
            may = stamp == (round_ + 1, 1) and self._settled is not None and self._settled[0] == self._stamp
        if may or (not self.joined and self._stamp == (0, 0)):
            reduction.begin(stamp)

    def lost(self, peer: str) -> Iterator[Effect]:
        """The link to `peer` is gone."""
        if self.reduction is not None:
            yield from self._guard(peer, self.reduction.forget(peer))

    def _guard(self, peer: str, effects: Iterator[Effect]) -> Iterator[Effect]:
        """Carry a reduction on, and say what is wrong if it cannot be; then see whether the round is over."""
        assert self.reduction is not None
        try:
            yield from effects
        except Misbehaved as error:
            yield self.tell(Accused(peer, str(error)))
        except Refusal as error:
            self.reduction.abort()
            yield self.tell(Refused(*self.reduction.stamp, error.peer or self.me, str(error)))
        if self.reduction.complete:
            yield from self._settle()

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
            yield from self._settle()
        yield from self._contribute()
        yield from self._settle()

    def _contribute(self) -> Iterator[Effect]:
        if self._offer is None or self._contributed or not self._running or self.me not in self._plan.contributors:
            return
        assert self.reduction is not None
        self._contributed = True
        weight = self._offer.contribution.weight
        yield self.tell(Ready(*self._stamp, weight))
        yield from self._guard(self.me, self.reduction.contribute(self._offer.bound, weight))

    def _settle(self) -> Iterator[Effect]:
        """If the result is here, give it to whom it is for, then tell the agent."""
        reduction = self.reduction
        if reduction is None or not self._running or not reduction.complete or self._applying or self._lent:
            return
        if not self._applied and (self._offer is not None or not self.joined):
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
        if self._settled != (self._stamp, self._applied):
            if not self._applied:
                self.missed_result(reduction.accumulator)
            self._settled = (self._stamp, self._applied)
            yield self.tell(Done(*self._stamp, reduction.weight, self._applied, True))

    def _have_applied(self, tensors: Mapping[str, Any] | None) -> Iterator[Effect]:
        assert self.reduction is not None
        self._applied, self._applying = True, False
        if self.joined:
            self._offer = None
            counted = not self._reason
            result = AverageResult(
                self._plan.round, tuple(self.members), self.reduction.weight, counted, self._reason, tensors
            )
            yield from self.round_ended(result)
        else:
            self.joined = True
            yield from self.became_member()
        yield from self._settle()
        yield from self._next_offer()
