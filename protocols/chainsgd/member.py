"""What a peer does to be a member of a group: it joins through the agent, links to all others, mends links, and leaves.

Of the peers, one has the agent (`agent.Agent`) beside it: the one that has nobody to join. What its device and its
agent say to each other goes through a queue, as if over a link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from p2pml.protocols.chainsgd.agent import Agent, Options
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
from p2pml.protocols.chainsgd.schedule import Scheduler, TreeScheduler
from p2pml.protocols.training.segments import signature, specs_of
from p2pml.statemachine import (
    Command,
    Connect,
    Effect,
    Event,
    Finish,
    PeerJoined,
    PeerLeft,
    Received,
    Reply,
    Send,
    SetTimer,
    Started,
    StateMachine,
    Stopping,
    TimerFired,
    on,
)
from p2pml.wire.plain import write

CONNECT, GOODBYE = "chainsgd connect", "chainsgd goodbye"
RETRY = 0.5
"""Seconds between attempts to link to a member."""
PATIENCE = 0.8
"""Seconds that a peer which is told to stop gives the running round."""

TO_AGENT = (Join, Meshed, Ready, Merged, Done, Aborted, Refused, Accused, Unlinked, Linked, Leave)


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How it ended for this peer: after which round, and why. `expelled`: the others go on without it."""

    round: int
    reason: str
    expelled: bool = False


_Handler = Callable[[Any, Any], Iterable[Effect]]


def entry(handler: _Handler) -> Callable[[Any, Any], Iterator[Effect]]:
    """A handler of events, at whose end device and agent of one peer have read what they had to say to each other."""

    @wraps(handler)
    def run(self: Member, event: Any) -> Iterator[Effect]:
        yield from self._outward(handler(self, event))
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, TO_AGENT):
                assert self._agent is not None
                yield from self._outward(self._agent.receive(self.me, message))
            else:
                yield from self._outward(self.told(message))

    return run


class Member(StateMachine):
    """See the module. Subclasses say what is done in rounds: `told`, `took_part`, `ended`."""

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
        self.info = {"addresses": list(addresses)}
        self.agent_id = agent
        self.options = options or Options()
        self.resources = resources
        self.members: list[str] = []
        self._specs = specs_of(tensors)
        self._scheduler = scheduler or TreeScheduler()
        self._agent: Agent | None = None
        self._inbox: deque[Any] = deque()
        self._linked: set[str] = set()
        self._held: dict[str, list[Send]] = {}  # segments for members whose link this side does not see yet
        self._others: dict[str, list[str]] = {}  # members, and those who are about to be, with their addresses
        self._meshed = False

    # ----------------------------------------------------------------------------------------------------- subclasses

    def told(self, message: Any) -> Iterator[Effect]:
        """The agent said something."""
        match message:
            case Welcome():
                yield from self._welcomed(message)
            case Gone():
                self._others.pop(message.peer, None)
                if message.peer in self.members:
                    self.members.remove(message.peer)
                yield from self._check_mesh()
            case Rejected():
                yield from self.ended(GroupEnd(0, message.reason, expelled=True))
            case Stop():
                yield from self.ended(GroupEnd(self.last_round, message.reason, message.expelled))
            case _:
                return

    @property
    def last_round(self) -> int:
        """The round that this peer is in."""
        raise NotImplementedError

    def took_part(self, segment_bytes: int) -> Iterator[Effect]:
        """The group is open to this peer; its models travel in segments of so many bytes."""
        raise NotImplementedError

    def ended(self, end: GroupEnd) -> Iterator[Effect]:
        """It is over for this peer."""
        yield Reply("leave", end)
        yield Finish(end)

    def tell(self, message: Any) -> Effect:
        """Say something to the agent."""
        assert self.agent_id is not None
        return Send(self.agent_id, message, "control")

    def drop_held(self, stamp: tuple[int, int]) -> None:
        """Of the segments that wait for a link, only those of this attempt are of use, which may have overtaken its plan."""
        for peer, sends in self._held.items():
            self._held[peer] = [send for send in sends if (send.message.round, send.message.attempt) == stamp]

    def meet(self, members: Sequence[str]) -> None:
        """These are the members now."""
        self.members = list(members)
        for peer in members:
            if peer != self.me:
                self._others.setdefault(peer, [])

    # --------------------------------------------------------------------------------------------------------- events

    @on(Started)
    @entry
    def _start(self, event: Started) -> Iterator[Effect]:
        if self.agent_id is None or self.agent_id == self.me:
            self.agent_id, self.members = self.me, [self.me]
            self._agent = Agent(self.me, signature(self._specs), self._scheduler, self.options, self.resources)
            yield from self.took_part(self.options.segment_bytes)
            yield from self._agent.start()

    @on(PeerJoined)
    @entry
    def _peer_joined(self, event: PeerJoined) -> Iterator[Effect]:
        peer = event.peer
        self._linked.add(peer)
        yield from self._held.pop(peer, [])
        addresses = event.info.get("addresses")
        addresses = [text for text in addresses if isinstance(text, str)] if isinstance(addresses, list) else []
        if self._agent is not None:
            self._agent.seen(peer, addresses)
        elif peer == self.agent_id:
            described = write({"tensors": signature(self._specs)}, "the model")
            yield self.tell(Join(described, self.resources))
        elif self._meshed:
            self._others[peer] = addresses
            yield self.tell(Linked(peer))
        else:
            yield from self._check_mesh()

    @on(PeerLeft)
    @entry
    def _peer_left(self, event: PeerLeft) -> Iterator[Effect]:
        peer = event.peer
        was_linked = peer in self._linked
        self._linked.discard(peer)
        self._held.pop(peer, None)
        yield from self.lost(peer)
        if self._agent is not None:
            yield from self._agent.left(peer, event.reason)
        elif peer == self.agent_id:
            yield from self.ended(GroupEnd(self.last_round, f"the group's agent {peer} is gone: {event.reason}"))
        elif peer in self._others:
            yield self.tell(Unlinked(peer, event.reason))
            yield SetTimer(CONNECT, RETRY / 10 if was_linked else RETRY)

    def lost(self, peer: str) -> Iterator[Effect]:
        """The link to `peer` is gone."""
        raise NotImplementedError

    @on(*(Received[kind] for kind in TO_AGENT))  # type: ignore[valid-type]
    @entry
    def _hear_device(self, event: Received[Any]) -> Iterator[Effect]:
        if self._agent is not None:
            yield from self._agent.receive(event.peer, event.message)

    @on(TimerFired)
    @entry
    def fired(self, event: TimerFired) -> Iterator[Effect]:
        """A timer is due."""
        if event.name == CONNECT:
            for peer, addresses in self._others.items():
                if peer not in self._linked and peer != self.agent_id:
                    yield Connect(peer, addresses)
        elif event.name == GOODBYE:
            yield from self.ended(GroupEnd(self.last_round, "it was stopped"))
        elif self._agent is not None:
            yield from self._agent.fired(event.name)

    @on(Stopping)
    @entry
    def _stop(self, event: Event) -> Iterator[Effect]:
        yield SetTimer(GOODBYE, PATIENCE)
        yield from self._leave("it was stopped")

    @on("leave")
    @entry
    def _leave_on_command(self, event: Command) -> Iterator[Effect]:
        yield from self._leave("it left the group")

    def _leave(self, reason: str) -> Iterator[Effect]:
        if self._agent is not None:
            yield from self._agent.stop(f"the group's agent {self.me}: {reason}")
        elif self.agent_id in self._linked:
            yield self.tell(Leave())
        else:
            yield from self.ended(GroupEnd(self.last_round, reason))

    # ----------------------------------------------------------------------------------------------------------- parts

    def _outward(self, effects: Iterable[Effect]) -> Iterator[Effect]:
        """All effects but what this peer says to itself."""
        for effect in effects:
            if type(effect) is not Send or effect.peer in self._linked:
                yield effect
            elif effect.peer == self.me:
                self._inbox.append(effect.message)
            elif effect.channel != "control":
                self._held.setdefault(effect.peer, []).append(effect)

    def _welcomed(self, message: Welcome) -> Iterator[Effect]:
        yield from self.took_part(message.segment_bytes)
        self._others = {peer: addresses for peer, addresses in message.peers.items() if peer != self.me}
        for peer, addresses in self._others.items():
            if peer not in self._linked:
                yield Connect(peer, addresses)
        yield from self._check_mesh()

    def _check_mesh(self) -> Iterator[Effect]:
        if self._others and not self._meshed and self._linked.issuperset(self._others):
            self._meshed = True
            yield self.tell(Meshed())
