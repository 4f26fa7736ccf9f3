"""The agent's rounds: who contributes, who combines with whom, and what happens when something goes wrong.

Whatever goes wrong in an attempt, it is aborted everywhere first, and every member says whether it had the whole result by then.
If any had, that result stands and those who lack it get it; if none had, no contribution was used up, and the round is tried
again with those who are left. So no contribution counts twice, and all members end with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import isclose
from typing import Any

from p2pml.protocols.chainsgd.broadcast import ranked, trees
from p2pml.protocols.chainsgd.messages import (
    Abort,
    Aborted,
    Done,
    Merged,
    Pair,
    Plan,
    Ready,
    Refused,
    Root,
    Void,
)
from p2pml.protocols.chainsgd.schedule import Schedule, Scheduler
from p2pml.protocols.training.segments import SEGMENT_BYTES
from p2pml.statemachine import CancelTimer, Effect, Report, Send, SetTimer

ROUND, MESH = "chainsgd round", "chainsgd mesh"


@dataclass(frozen=True, slots=True)
class Options:
    """How a group works; the agent's count for all.

    min_peers: members with which the first round begins. rounds: after which the group ends; None: never by itself.
    round_timeout: seconds from the first contribution to a round, after which it goes on without those who have none
    yet; None: it waits. mesh_timeout: seconds to make or mend the links between all members. segment_bytes: see
    `p2pml.protocols.training.segments`.
    """

    min_peers: int = 2
    rounds: int | None = None
    round_timeout: float | None = None
    mesh_timeout: float = 10.0
    segment_bytes: int = SEGMENT_BYTES


class Phase(Enum):
    """Where the agent is: nothing runs; an attempt runs, or is being aborted; links are missing for another one."""

    IDLE = "idle"
    RUNNING = "running"
    ABORTING = "aborting"
    MENDING = "mending"


class Rounds:
    """The rounds of a group that `me` started; `agent.Agent` has its members come and go."""

    def __init__(self, me: str, scheduler: Scheduler, options: Options, resources: float) -> None:
        self.me = me
        self.options = options
        self.round = 0
        self.attempt = 0
        self.phase = Phase.IDLE
        self.members: list[str] = [me]
        self.excluded: dict[str, str] = {}
        self._scheduler = scheduler
        self._meshed: list[str] = []  # those who are let in when the round is over
        self._resources = {me: resources}
        self._holders = {me}  # members that have the group's newest model
        self._behind: set[str] = set()  # members that have not applied the last result
        self._leaving: set[str] = set()
        self._broken: set[frozenset[str]] = set()  # pairs of members without a link
        self._schedule = Schedule([])
        self._weights: dict[str, float] = {}
        self._total = 0.0
        self._root_named = False
        self._open = False  # whether the round has to be closed; not while only joiners get the model
        self._reducing = False
        self._void = ""
        self._done: set[str] = set()
        self._awaited: set[str] = set()

    def dismiss(self, peer: str, reason: str, *, expelled: bool) -> Iterator[Effect]:
        """End the membership of `peer`."""
        raise NotImplementedError

    def stop(self, reason: str) -> Iterator[Effect]:
        """End the group."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------------------- plans

    def _next(self) -> Iterator[Effect]:
        """The last round is over."""
        self.phase = Phase.IDLE
        for peer in [peer for peer in self.members if peer in self._leaving]:
            yield from self.dismiss(peer, "it left the group", expelled=False)
        if self.options.rounds is not None and self.round >= self.options.rounds:
            yield from self.stop(f"all {self.round} rounds are done")
        elif self._meshed and self._holders and (self.round or self._are_enough()):
            for peer in self._meshed:
                yield Report("joined", {"peer": peer, "members": len(self.members) + 1})
                self.members.append(peer)
            self._meshed = []
            yield from self._plan_spread()
        elif self.round or self._are_enough():
            self.round, self.attempt, self._open = self.round + 1, 0, True
            self.excluded = {
                peer: "it is not through with the last round" for peer in self.members if peer in self._behind
            }
            self._holders = set()
            yield from self._plan_reduction()

    def _are_enough(self) -> bool:
        return len(self.members) + len(self._meshed) >= self.options.min_peers

    def _plan_reduction(self) -> Iterator[Effect]:
        self._begin(reducing=True)
        contributors = [peer for peer in self.members if peer not in self.excluded]
        self._schedule = Schedule(contributors, self._resources)
        self._weights, self._root_named = {}, False
        if not contributors:
            reasons = "; ".join(f"{peer}: {reason}" for peer, reason in self.excluded.items())
            self._void = f"round {self.round} has no contribution left ({reasons})"
            yield Report("void", {"round": self.round, "reason": self._void})
            for peer in self.members:
                yield Send(peer, Void(self.round, self.attempt, self._void), "control")
            return
        self._scheduler.begin(self._schedule)
        pairs = list(self._new_pairs())
        remaining = self._schedule.remaining()
        tree = ranked(remaining[0], self.members, self._resources) if len(remaining) == 1 else []
        self._root_named = bool(tree)
        excluded = {peer: reason for peer, reason in self.excluded.items() if peer in self.members}
        plan = Plan(
            self.round,
            self.attempt,
            self.members[:],
            contributors,
            excluded,
            [list(pair) for pair in pairs],
            [tree] if tree else [],
        )
        for peer in self.members:
            yield Send(peer, plan, "control")
        yield from self._report_pairs(pairs)

    def _plan_spread(self) -> Iterator[Effect]:
        """Those who have the group's model give it to the others."""
        self._begin(reducing=False)
        rank = ranked("", self.members, self._resources)[1:]
        lacking = [peer for peer in rank if peer not in self._holders]
        spread = trees([peer for peer in rank if peer in self._holders], lacking)
        plan = Plan(self.round, self.attempt, self.members[:], [], {}, [], spread, joining=not self._open)
        for peer in self.members:
            yield Send(peer, plan, "control")

    def _begin(self, *, reducing: bool) -> None:
        self.phase = Phase.RUNNING
        self.attempt += 1
        self._reducing, self._void, self._done = reducing, "", set()

    def _new_pairs(self) -> Iterator[tuple[str, str]]:
        while len(self._schedule.remaining()) > 1:
            pair = self._scheduler.next_pair()
            if pair is None:
                return
            self._schedule.name(*pair)
            yield pair

    def _name_pairs(self) -> Iterator[Effect]:
        """Something changed: the scheduler may name pairs, and in the end there is a root."""
        if self._root_named:
            return
        pairs = list(self._new_pairs())
        for sender, receiver in pairs:
            for peer in (receiver, sender):
                yield Send(peer, Pair(self.round, self.attempt, sender, receiver), "control")
        yield from self._report_pairs(pairs)
        remaining = self._schedule.remaining()
        if len(remaining) == 1:
            self._root_named = True
            tree = ranked(remaining[0], self.members, self._resources)
            yield Send(remaining[0], Root(self.round, self.attempt, tree), "control")

    def _report_pairs(self, pairs: list[tuple[str, str]]) -> Iterator[Effect]:
        for sender, receiver in pairs:
            yield Report("pair", {"round": self.round, "sender": sender, "receiver": receiver})

    def _close(self) -> Iterator[Effect]:
        """All members are done."""
        yield CancelTimer(ROUND)
        expected = sum(self._weights.get(peer, 0.0) for peer in self._schedule.contributors)
        if self._reducing and not self._void and not isclose(self._total, expected, rel_tol=1e-9):
            yield from self.stop(f"round {self.round} has weight {self._total}, but its contributions have {expected}")
            return
        if self._open:
            self._open = False
            contributors = [] if self._void else list(self._schedule.contributors)
            fields = {"round": self.round, "attempt": self.attempt, "contributors": contributors}
            yield Report("closed", {**fields, "excluded": dict(self.excluded), "members": len(self.members)})
        yield from self._next()

    # ------------------------------------------------------------------------------------------------ what devices say

    def _in_attempt(self, peer: str, message: Any) -> Iterator[Effect]:
        match message:
            case Aborted() if self.phase is Phase.ABORTING:
                self._awaited.discard(peer)
                if message.complete:
                    self._holders.add(peer)
                yield from self._resume()
            case Ready() if self.phase is Phase.RUNNING:
                self._schedule.ready.add(peer)
                self._weights[peer] = message.weight
                if self._schedule.ready.issuperset(self._schedule.contributors):
                    yield CancelTimer(ROUND)
                elif self.options.round_timeout is not None and len(self._schedule.ready) == 1:
                    yield SetTimer(ROUND, self.options.round_timeout)
                yield from self._name_pairs()
            case Merged() if self.phase is Phase.RUNNING and self._schedule.sends.get(message.sender) == peer:
                self._schedule.merge(message.sender)
                yield from self._name_pairs()
            case Refused() if self._reducing:
                yield from self._exclude(message.peer, message.reason)
            case _:
                return

    def _has_done(self, peer: str, message: Done) -> Iterator[Effect]:
        if message.applied:
            self._behind.discard(peer)
        if (message.round, message.attempt) != (self.round, self.attempt) or self.phase is not Phase.RUNNING:
            return
        if not message.applied:
            self._behind.add(peer)
        if message.holds:
            self._holders.add(peer)
        self._total = message.weight
        self._done.add(peer)
        if self._done.issuperset(self.members):
            yield from self._close()

    def _exclude(self, peer: str, reason: str) -> Iterator[Effect]:
        """The round goes on without the contribution of `peer`, who stays a member."""
        if peer in self._schedule.contributors and peer not in self.excluded:
            self.excluded[peer] = reason
            yield Report("refused", {"round": self.round, "peer": peer, "reason": reason})
            yield from self._abort(f"the contribution of {peer} is not used: {reason}")

    # ------------------------------------------------------------------------------------------------ abort and resume

    def _abort(self, reason: str) -> Iterator[Effect]:
        if self.phase is not Phase.RUNNING:
            return
        self.phase = Phase.ABORTING
        self._awaited = set(self.members)
        yield CancelTimer(ROUND)
        yield Report("aborted", {"round": self.round, "attempt": self.attempt, "reason": reason})
        for peer in self.members:
            yield Send(peer, Abort(self.round, self.attempt, reason), "control")

    def _resume(self) -> Iterator[Effect]:
        """Go on if all members have aborted, and all links are there."""
        if self.phase not in (Phase.ABORTING, Phase.MENDING) or self._awaited:
            return
        if self._broken:
            if self.phase is Phase.ABORTING:
                self.phase = Phase.MENDING
                yield SetTimer(MESH, self.options.mesh_timeout)
            return
        yield CancelTimer(MESH)
        if self._holders:
            yield from self._plan_spread()
        else:
            yield from self._plan_reduction()
