"""What a device does in an attempt, as the agent plans it: it merges, passes on and receives, and reports what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.member import Member, entry
from p2pml.protocols.chainsgd.messages import (
    Abort,
    Aborted,
    Accused,
    Gone,
    Merged,
    Pair,
    Plan,
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
from p2pml.statemachine import Effect, Received, TimerFired, on, place
from p2pml.wire.codec import Head

_TO_DEVICE = (Welcome, Gone, Rejected, Stop, Plan, Pair, Root, Abort, Void)


class Device(Member):
    """See the module. Its subclass has the contributions, and says what becomes of a result."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        agent: str | None,
        options: Options | None,
        scheduler: Scheduler | None,
        addresses: Sequence[str],
        resources: float,
    ) -> None:
        super().__init__(
            tensors, agent=agent, options=options, scheduler=scheduler, addresses=addresses, resources=resources
        )
        self.reduction: Reduction | None = None  # from the agent's welcome on
        self.joined = False  # this peer is a member, and has the group's model
        self.plan = Plan(0, 0, [], [], {}, [], [])
        self.running = False  # the plan's attempt
        self.reason = ""  # why this peer's contribution does not count in this round
        self.contributed = False
        self.applied = False  # the result in the accumulator was given to whom it is for
        self.settled: tuple[Stamp, bool] | None = None  # what the last `Done` was for: the attempt, and `applied`

    # ----------------------------------------------------------------------------------------------------- subclasses

    def round_began(self, round_: int) -> Iterator[Effect]:
        """The group begins a round, to which this peer may contribute."""
        yield from ()

    def prepare_model(self) -> None:
        """Between rounds: have the group's model in the accumulator, for those who join. As a rule it is there."""

    def contribute(self) -> Iterator[Effect]:
        """An attempt began: hand in the contribution, if there is one."""
        raise NotImplementedError

    def settle(self) -> Iterator[Effect]:
        """If the result is here, give it to whom it is for, then tell the agent."""
        raise NotImplementedError

    def voided(self, reduction: Reduction, message: Void) -> Iterator[Effect]:
        """The round has no result."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------ segments

    @on(*(Received[kind] for kind in _TO_DEVICE))  # type: ignore[valid-type]
    @entry
    def _hear_agent(self, event: Received[Any]) -> Iterator[Effect]:
        if event.peer == self.agent_id:
            yield from self.told(event.message)

    @place(Segment)
    def _place_segment(self, peer: str, head: Head) -> list[memoryview] | None:
        if self.reduction is None:
            return None
        self.foresee((head.fields["round"], head.fields["attempt"]))
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
        self.foresee(stamp)
        yield from self.guard(peer, reduction.arrived(peer, message))
        is_last = message.index == len(reduction.segments) - 1
        if is_last and type(message) is Segment and not (self.plan.trees and stamp == self.stamp):
            yield self.tell(Merged(*stamp, peer))

    @on(TimerFired)
    @entry
    def fired(self, event: TimerFired) -> Iterator[Effect]:
        """A timer is due."""
        if event.name != PUMP:
            yield from super().fired(event)
        elif self.reduction is not None:
            yield from self.guard(self.me, self.reduction.pump())

    # -------------------------------------------------------------------------------------------------------- plans

    @property
    def stamp(self) -> Stamp:
        return (self.plan.round, self.plan.attempt)

    @property
    def last_round(self) -> int:
        """The round that this peer is in."""
        return self.plan.round

    def told(self, message: Any) -> Iterator[Effect]:
        """The agent said something."""
        reduction = self.reduction
        match message:
            case Plan() if reduction is not None and (message.round, message.attempt) > self.stamp:
                yield from self._planned(reduction, message)
            case Pair() | Root() | Abort() | Void() if reduction is not None:
                if (message.round, message.attempt) == self.stamp or isinstance(message, Void):
                    yield from self._told_more(reduction, message)
            case _:
                yield from super().told(message)

    def _planned(self, reduction: Reduction, plan: Plan) -> Iterator[Effect]:
        is_new = plan.round > self.plan.round
        self.plan, self.running, self.contributed = plan, True, False
        self.meet(plan.members)
        self.drop_held(self.stamp)
        if plan.contributors:
            self.applied, self.reason = False, plan.excluded.get(self.me, "")
            reduction.begin(self.stamp)
            senders = [sender for sender, receiver in plan.pairs if receiver == self.me]
            yield from self.guard(self.me, reduction.plan(senders, final=bool(plan.trees)))
            for sender, receiver in plan.pairs:
                if sender == self.me:
                    yield from self.guard(self.me, reduction.send_to(receiver))
            if plan.trees and plan.trees[0][0] == self.me:
                yield from self.guard(self.me, reduction.be_root(plan.trees[0]))
            if is_new:
                yield from self.round_began(plan.round)
            yield from self.contribute()
            return
        mine = next((tree for tree in plan.trees if self.me in tree), None)
        if mine is None:
            reduction.skip(self.stamp)
            yield from self.settle()
        elif mine[0] == self.me:
            if plan.joining:
                self.prepare_model()
            yield from self.guard(self.me, reduction.serve(self.stamp, mine))
        else:
            reduction.begin(self.stamp)
            yield from self.guard(self.me, reduction.plan([], final=True))

    def _told_more(self, reduction: Reduction, message: Pair | Root | Abort | Void) -> Iterator[Effect]:
        match message:
            case Pair() if self.running and message.receiver == self.me:
                yield from self.guard(self.me, reduction.plan([message.sender], final=False))
            case Pair() if self.running:
                yield from self.guard(self.me, reduction.send_to(message.receiver))
            case Root() if self.running:
                yield from self.guard(self.me, reduction.be_root(message.tree))
            case Abort():
                self.running = False
                reduction.abort()
                yield self.tell(Aborted(*self.stamp, reduction.complete))
            case Void():
                yield from self.voided(reduction, message)
            case _:
                return

    def foresee(self, stamp: Stamp) -> None:
        """A segment may overtake the plan of its attempt.

        The memory for it is free by then, or the agent had not planned.
        """
        reduction = self.reduction
        if reduction is None or stamp == reduction.stamp:
            return
        round_, attempt = self.stamp
        if not self.running:
            may = not reduction.complete and stamp == (round_, attempt + 1)
        else:
            may = stamp == (round_ + 1, 1) and self.settled is not None and self.settled[0] == self.stamp
        if may or (not self.joined and self.stamp == (0, 0)):
            reduction.begin(stamp)

    def lost(self, peer: str) -> Iterator[Effect]:
        """The link to `peer` is gone."""
        if self.reduction is not None:
            yield from self.guard(peer, self.reduction.forget(peer))

    def guard(self, peer: str, effects: Iterator[Effect]) -> Iterator[Effect]:
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
            yield from self.settle()
