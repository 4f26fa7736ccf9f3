"""The mobile agent: who is a member, when a round begins, who combines with whom, and what happens when something goes
wrong.

It is no machine of its own but a part of the peer that started the group. Its inputs are what devices say and which
peers are there; its outputs are effects, of which a `Send` to its own peer is for the device beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from p2pml.errors import MessageError
from p2pml.protocols.chainsgd.messages import (
    Aborted,
    Accused,
    Done,
    Gone,
    Join,
    Leave,
    Linked,
    Merged,
    Meshed,
    Ready,
    Refused,
    Rejected,
    Stop,
    Unlinked,
    Welcome,
)
from p2pml.protocols.chainsgd.rounds import MESH, ROUND, Options, Phase, Rounds
from p2pml.protocols.chainsgd.schedule import Scheduler
from p2pml.protocols.training.errors import ModelMismatch
from p2pml.protocols.training.segments import check_same
from p2pml.statemachine import CancelTimer, Effect, Report, Send, SetTimer
from p2pml.wire.plain import plain_loads

__all__ = ["Agent", "Options"]

MAX_SIGNATURE = 1 << 24
"""Bytes of a model's description, beyond which a peer is not let in."""


class Agent(Rounds):
    """See the module. `signature`: of the model that is trained; its owner, `me`, is the first member."""

    def __init__(self, me: str, signature: list[Any], scheduler: Scheduler, options: Options, resources: float) -> None:
        super().__init__(me, scheduler, options, resources)
        self._signature = signature
        self._candidates: list[str] = []  # they make their links
        self._addresses: dict[str, list[str]] = {}

    def start(self) -> Iterator[Effect]:
        """The group is open."""
        yield from self._next()

    def known(self) -> list[str]:
        """All members, and those who are about to be."""
        return [*self.members, *self._candidates, *self._meshed]

    # ---------------------------------------------------------------------------------------------------- membership

    def seen(self, peer: str, addresses: list[str]) -> None:
        """There is a link to `peer`, who listens at `addresses`."""
        self._addresses[peer] = addresses

    def _join(self, peer: str, message: Join) -> Iterator[Effect]:
        if peer in self.known():
            return
        try:
            described = plain_loads(message.signature.data, f"the model of peer {peer}", MAX_SIGNATURE)
            check_same(self._signature, described.get("tensors", []), f"peer {peer}", f"the group of {self.me}")
        except (ModelMismatch, MessageError) as error:
            yield Report("rejected", {"peer": peer, "reason": str(error)})
            yield Send(peer, Rejected(str(error)), "control")
            return
        peers = {other: self._addresses.get(other, []) for other in self.known()}
        self._candidates.append(peer)
        self._resources[peer] = message.resources
        yield Send(peer, Welcome(peers, self.options.segment_bytes), "control")
        yield SetTimer(f"{MESH} {peer}", self.options.mesh_timeout)

    def _has_meshed(self, peer: str) -> Iterator[Effect]:
        if peer in self._candidates:
            self._candidates.remove(peer)
            self._meshed.append(peer)
            yield CancelTimer(f"{MESH} {peer}")
            if self.phase is Phase.IDLE:
                yield from self._next()

    def left(self, peer: str, reason: str) -> Iterator[Effect]:
        """`peer` is gone."""
        self._addresses.pop(peer, None)
        if peer not in self.known():
            return
        was_member = peer in self.members
        for place in (self.members, self._candidates, self._meshed):
            if peer in place:
                place.remove(peer)
        for members in (self._holders, self._behind, self._leaving, self._awaited, self._done):
            members.discard(peer)
        self._broken = {pair for pair in self._broken if peer not in pair}
        yield CancelTimer(f"{MESH} {peer}")
        for other in self.known():
            yield Send(other, Gone(peer, reason), "control")
        if not was_member:
            return
        yield Report("left", {"peer": peer, "reason": reason, "members": len(self.members)})
        if self.phase is Phase.RUNNING:
            if self._done.issuperset(self.members):
                yield from self._close()
            else:
                yield from self._abort(f"{peer} left: {reason}")
        else:
            yield from self._resume()

    def _leave(self, peer: str) -> Iterator[Effect]:
        if peer not in self.members or self.phase is Phase.IDLE or self._is_awaited(peer):
            yield from self.dismiss(peer, "it left the group", expelled=False)
        else:
            self._leaving.add(peer)

    def _is_awaited(self, peer: str) -> bool:
        """Whether the round waits for a contribution of `peer` that will not come."""
        contributes = self._reducing and peer in self._schedule.contributors
        return self.phase is Phase.RUNNING and contributes and peer not in self._schedule.ready

    def dismiss(self, peer: str, reason: str, *, expelled: bool) -> Iterator[Effect]:
        if peer == self.me:
            yield from self.stop(reason)
        elif peer in self.known():
            yield Send(peer, Stop(reason, expelled), "control")
            yield from self.left(peer, reason)

    def stop(self, reason: str) -> Iterator[Effect]:
        """End the group."""
        for peer in self.known():
            yield Send(peer, Stop(reason), "control")

    # ------------------------------------------------------------------------------------------------- what can happen

    def receive(self, peer: str, message: Any) -> Iterator[Effect]:
        """A device said something."""
        match message:
            case Join():
                yield from self._join(peer, message)
            case Meshed():
                yield from self._has_meshed(peer)
            case Leave():
                yield from self._leave(peer)
            case Linked():
                self._broken.discard(frozenset((peer, message.peer)))
                if self.phase is Phase.MENDING:
                    yield from self._resume()
            case Unlinked():
                yield from self._unlinked(peer, message)
            case Accused() if peer in self.members:
                yield Report("accused", {"peer": message.peer, "by": peer, "reason": message.reason})
                yield from self.dismiss(message.peer, f"{peer} says: {message.reason}", expelled=True)
            case Done() if peer in self.members:
                yield from self._has_done(peer, message)
            case Ready() | Merged() | Refused() | Aborted() if peer in self.members:
                if (message.round, message.attempt) == (self.round, self.attempt):
                    yield from self._in_attempt(peer, message)
            case _:
                return

    def _unlinked(self, peer: str, message: Unlinked) -> Iterator[Effect]:
        if message.peer not in self.known():
            yield Send(peer, Gone(message.peer, message.reason), "control")
        elif peer in self.members and message.peer in self.members:
            self._broken.add(frozenset((peer, message.peer)))
            yield from self._abort(f"{peer} has no link to {message.peer}: {message.reason}")

    def fired(self, timer: str) -> Iterator[Effect]:
        """A timer of the agent is due."""
        if timer == ROUND and self.phase is Phase.RUNNING and self._reducing:
            for peer in self._schedule.contributors:
                if peer not in self._schedule.ready:
                    yield from self._exclude(peer, f"it was not ready within {self.options.round_timeout:g} s")
        elif timer == MESH and self.phase is Phase.MENDING:
            while self._broken:
                counts: dict[str, int] = {}
                for pair in self._broken:
                    for peer in pair:
                        counts[peer] = counts.get(peer, 0) + (peer != self.me)
                worst = max(counts, key=lambda peer: (counts[peer], self.members.index(peer)))
                others = sorted(peer for pair in self._broken if worst in pair for peer in pair if peer != worst)
                reason = f"it had no link to {', '.join(others)} within {self.options.mesh_timeout:g} s"
                yield from self.dismiss(worst, reason, expelled=True)
        elif timer.startswith(f"{MESH} "):
            peer = timer.removeprefix(f"{MESH} ")
            if peer in self._candidates:
                reason = f"it had not linked to all members within {self.options.mesh_timeout:g} s"
                yield from self.dismiss(peer, reason, expelled=True)
