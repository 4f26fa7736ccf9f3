"""Runs several state machines in memory, in virtual time, in an order drawn from a seed.

A `Cluster` is to machines what `p2pml.host` is on real links. Every step, one thing happens, chosen at random among all
that may happen next: messages keep their order only within (sender, receiver, channel), computations within a lane, and a
peer's own events among themselves. So a seed stands for one of the orders that a network allows, always the same one::

    cluster = Cluster({"a": PingPong(), "b": PingPong()}, seed=1)
    cluster.run(until=lambda: cluster.finished("a", "b"))
    assert cluster.result("a") == 10
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from p2pml import statemachine as sm
from p2pml.errors import LinkClosed, MachineFailed
from p2pml.wire.options import ChannelOptions
from tests.driver_links import Memory, MemoryReused, Parcel, Way
from tests.driver_peers import Answer, Lane, Peer, show

__all__ = ["Answer", "Cluster", "MemoryReused", "Stuck"]


class Stuck(AssertionError):
    """`Cluster.run` ran out of events, or of steps, before what it waited for."""


class Cluster:
    """Machines by peer id, and the links between them.

    links: pairs of peers that are linked at the start (default: all). Only machines of equal `name` see each other.
    wire: send messages through the codec, so that received tensors are `p2pml.wire.tensors.Tensor` in other memory.
    memory: when the sender's memory is read: at the `Send` ('early'), when the message arrives ('late'), or late with
        `MemoryReused` raised if it has changed ('checked').
    tick: the most that a step takes, in seconds. pace: of a peer, the seconds for a `Compute` of cost 1; else it may be
        done at once. tolerant: a machine that fails is told to its peers only; else `step` raises its `MachineFailed`.
    """

    def __init__(
        self,
        machines: Mapping[str, sm.StateMachine],
        seed: int,
        *,
        links: Iterable[tuple[str, str]] | None = None,
        wire: bool = True,
        memory: Memory = "checked",
        tick: float = 1e-3,
        pace: Mapping[str, float] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=60)
        self.reports: dict[str, list[sm.Report]] = {}
        self.pace = dict(pace or {})
        self._wire, self._memory, self._tick, self._tolerant = wire, memory, tick, tolerant
        self._peers: dict[str, Peer] = {}
        self._ways: dict[tuple[str, str], Way] = {}
        self._may: list[Callable[[], bool]] = []  # what may happen next; what then cannot is taken out
        self._awake: set[Callable[[], bool]] = set()  # the same, to look up only: its order depends on addresses
        self._due: list[tuple[float, int]] = []  # when, and the number of what is called then
        self._calls: dict[int, Callable[[], bool]] = {}
        self._count = 0
        for name, machine in machines.items():
            self._start(name, machine)
        names = list(machines)
        for a, b in [(a, b) for a in names for b in names if a < b] if links is None else links:
            self.link(a, b)

    # ---------------------------------------------------------------------------------------------- for tests

    def step(self) -> bool:
        """Let one thing happen; false if nothing can."""
        self.now += self.rng.random() * self._tick
        while True:
            while self._due and (self._due[0][0] <= self.now or not self._may):
                due, number = heapq.heappop(self._due)
                if self._calls.pop(number)():
                    self.now = max(self.now, due)
            if not self._may:
                return False
            index = self.rng.randrange(len(self._may))
            action = self._may[index]
            try:
                if action():
                    self.steps += 1
                    return True
            except (AssertionError, MachineFailed) as error:
                error.add_note(self.story())
                raise
            self._may[index] = self._may[-1]
            self._may.pop()
            self._awake.discard(action)

    def run(self, until: Callable[[], bool] | None = None, max_steps: int = 100_000) -> None:
        """Step until `until()` is true, or without it until nothing can happen. Raises `Stuck`, with what happened last."""
        for _ in range(max_steps):
            if until is not None and until():
                return
            if not self.step():
                if until is None:
                    return
                raise Stuck(f"nothing can happen any more\n{self.story()}")
        if until is None or not until():
            raise Stuck(f"not done after {max_steps} steps\n{self.story()}")

    def finished(self, *names: str) -> bool:
        """Whether all these machines, or all that live, have finished."""
        return all(self._peers[name].machine.finished for name in names or self.alive)

    def result(self, name: str) -> Any:
        """What a machine finished with. Raises its `MachineFailed`, or `LookupError` if it has not finished."""
        peer = self._peers[name]
        if peer.failure is not None:
            raise peer.failure
        if not peer.machine.finished:
            raise LookupError(f"{name} has not finished")
        return peer.machine.result

    @property
    def alive(self) -> list[str]:
        """The peers that were not killed and did not fail."""
        return [name for name, peer in self._peers.items() if peer.alive and peer.failure is None]

    def feed(self, name: str, event: sm.Event) -> None:
        """Give a machine an event of your own, e.g. `LinkMeasured` or `Stopping`, after those that it is due."""
        self._peers[name].feed(event)

    def command(self, name: str, command: str, value: Any = None) -> Answer:
        """Give a machine a `Command`."""
        answer, peer = Answer(), self._peers[name]
        if peer.runs:
            peer.asked.setdefault(command, deque()).append(answer)
            peer.feed(sm.Command(command, value))
        else:
            answer.give(peer.failure or LinkClosed(f"{name} has finished"))
        return answer

    def join(self, name: str, machine: sm.StateMachine, links: Iterable[str] | None = None) -> None:
        """Start a machine now, linked to all peers or to `links`; also one that died, under its old id."""
        others = list(self.alive if links is None else links)
        self._start(name, machine)
        for other in others:
            self.link(name, other)

    def link(self, a: str, b: str) -> bool:
        """Link two peers that run, unless they are; false if one does not run."""
        one, other = self._peers[a], self._peers.get(b)
        if other is None or one is other or not (one.runs and other.runs):
            return False
        ends = [(one, other), (other, one)]
        old = [self._ways.get((sender.name, receiver.name)) for sender, receiver in ends]
        if all(way is not None and way.closing is None for way in old) or one.machine.name != other.machine.name:
            return True
        for way in old:
            self.unlink(way)
        for sender, receiver in ends:
            way = self._ways[sender.name, receiver.name] = Way(self, sender, receiver)
            receiver.feed(sm.PeerJoined(sender.name, dict(sender.machine.info)), way)
        return True

    def cut(self, a: str, b: str, reason: str = "the link was cut") -> None:
        """Break a link: of what is under way on each channel a random part still arrives, then `PeerLeft`."""
        self._close([(a, b), (b, a)], reason)

    def kill(self, name: str, reason: str = "the peer died") -> None:
        """End a peer without a word, and cut its links."""
        peer = self._peers[name]
        peer.alive = False
        peer.end(LinkClosed(reason))
        self._close([ends for ends in self._ways if name in ends], reason)

    def story(self) -> str:
        """The last events and their effects, how the machines are, and which messages wait."""
        lines = [*self.trace, f"after {self.steps} steps, at {self.now:.4f} s:"]
        for name, peer in self._peers.items():
            state = "failed" if peer.failure else "dead" if not peer.alive else "runs" if peer.runs else "finished"
            lines.append(f"  {name} {state}; its timers: {list(peer.timers)}, computations: {sorted(peer.lanes)}")
        for (sender, receiver), way in self._ways.items():
            lines += [
                f"  {sender} -> {receiver} on '{channel}': {len(flow.waiting)} wait, credit {flow.credit}"
                for channel, flow in way.flows.items()
                if flow.waiting
            ]
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------ for the parts

    def wake(self, action: Callable[[], bool]) -> bool:
        """From now on `action` may happen, until it returns false."""
        if action not in self._awake:
            self._awake.add(action)
            self._may.append(action)
        return True

    def wake_way(self, sender: str, receiver: str) -> None:
        """The receiver knows of the sender now."""
        way = self._ways.get((sender, receiver))
        for flow in way.flows.values() if way is not None else ():
            self.wake(flow.leave)

    def at(self, due: float, call: Callable[[], bool]) -> None:
        """Call when it is time; if it returns false, time does not pass for it."""
        self._count += 1
        self._calls[self._count] = call
        heapq.heappush(self._due, (due, self._count))

    def note(self, text: str) -> None:
        """Remember it for `story`."""
        self.trace.append(f"{self.now:10.4f} {text}")

    def handle(self, peer: Peer, event: sm.Event) -> None:
        """Give a machine an event, and carry out its effects."""
        if not peer.runs:
            return
        where = show(event)
        try:
            effects = peer.machine.handle(event, self.now)
            self.note(f"{peer.name}: {where}" + "".join(f"\n{'':13}-> {show(effect)}" for effect in effects))
            for effect in effects:
                self._carry_out(peer, effect)
        except Exception as error:
            self.note(f"{peer.name}: {where} -> {error!r}")
            self.fail(peer, error, f"its handler of {where}")

    def fail(self, peer: Peer, error: Exception, where: str) -> None:
        """A machine raised."""
        text = f"{peer.machine.name} on {peer.name} failed in {where}: {type(error).__name__}: {error}"
        peer.failure, peer.machine.finished = MachineFailed(text, peer=peer.name), True
        peer.end(peer.failure)
        self._close([ends for ends in self._ways if peer.name in ends], f"its machine failed in {where}: {error!r}")
        if not self._tolerant:
            raise peer.failure from error

    def unlink(self, way: Way | None) -> bool:
        """One direction has ended: the other will. False if that is old news."""
        if way is None or self._ways.get((way.sender.name, way.receiver.name)) is not way:
            return False
        del self._ways[way.sender.name, way.receiver.name]
        reason = way.closing or "linked anew"
        way.close(reason, last_words=False)
        for flow in way.flows.values():
            flow.under_way.clear()
        way.receiver.feed(sm.PeerLeft(way.sender.name, reason), way)
        other = self._ways.get((way.receiver.name, way.sender.name))
        if other is not None and other.closing is None:
            other.close(reason, last_words=False)
        return True

    def _start(self, name: str, machine: sm.StateMachine) -> None:
        old = self._peers.get(name)
        if old is not None:
            if old.runs:
                raise ValueError(f"{name} runs already")
            for way in [way for ends, way in self._ways.items() if name in ends]:
                self.unlink(way)
        peer = self._peers[name] = Peer(self, name, machine)
        self.reports[name] = []
        machine.begin(name, self.rng.getrandbits(32), self.now)
        peer.feed(sm.Started())

    def _close(self, ways: Iterable[tuple[str, str]], reason: str, last_words: bool = False) -> None:
        for ends in ways:
            if ends in self._ways:
                self._ways[ends].close(reason, last_words)

    def _carry_out(self, peer: Peer, effect: sm.Effect) -> None:
        match effect:
            case sm.Send():
                self._send(peer, effect)
            case sm.Grant():
                if not self._options(peer, effect.channel).manual:
                    raise ValueError(f"channel '{effect.channel}' of {peer.machine.name} is not manual")
                if (effect.peer, peer.name) in self._ways:
                    self._ways[effect.peer, peer.name].flow(effect.channel).come_back(effect.messages)
            case sm.SetTimer():
                timer = peer.timers[effect.name] = object()
                self.at(self.now + effect.delay, partial(self._ring, peer, effect.name, timer))
            case sm.CancelTimer():
                peer.timers.pop(effect.name, None)
            case sm.Compute():
                peer.lanes.setdefault(effect.lane, Lane(peer)).add(effect)
            case sm.Connect():
                if not self.link(peer.name, effect.peer):
                    peer.feed(sm.PeerLeft(effect.peer, "cannot be reached"))
            case sm.Disconnect():
                self._close([(peer.name, effect.peer)], effect.reason, last_words=True)
                self._close([(effect.peer, peer.name)], effect.reason)
            case sm.Report():
                self.reports[peer.name].append(effect)
            case sm.Reply():
                if peer.asked.get(effect.name):
                    peer.asked[effect.name].popleft().give(effect.value)
            case sm.Finish():
                peer.end(LinkClosed(f"{peer.machine.name} has finished"))
                mine = [ends for ends in self._ways if ends[0] == peer.name]
                self._close(mine, "its machine has finished", last_words=True)
            case _:
                raise TypeError(f"{effect!r} is no effect")

    def _ring(self, peer: Peer, name: str, timer: object) -> bool:
        due = peer.timers.get(name) is timer
        if due:
            peer.feed(sm.TimerFired(name), timer)
        return due

    def _options(self, peer: Peer, channel: str) -> ChannelOptions:
        if channel not in peer.machine.channels:
            raise LookupError(f"{peer.machine.name} has no channel '{channel}'")
        return peer.machine.channels[channel]

    def _send(self, peer: Peer, effect: sm.Send) -> None:
        options = self._options(peer, effect.channel)
        way, back = self._ways.get((peer.name, effect.peer)), self._ways.get((effect.peer, peer.name))
        if way is None or way.closing is not None or peer.members.get(effect.peer) is not back:
            if effect.tag is not None:
                peer.feed(sm.SendFailed(effect.peer, effect.tag, "the peer is not here"))
            return
        flow, parcel = way.flow(effect.channel), Parcel(effect, self._wire, self._memory)
        if effect.or_drop and (flow.waiting or flow.credit <= 0):
            way.failed(parcel, "no credit")
            return
        for old in [old for old in flow.waiting if effect.supersedes is not None and old.key == effect.supersedes]:
            flow.waiting.remove(old)
            way.failed(old, "superseded by a newer message")
        if len(flow.waiting) >= options.queue:
            raise RuntimeError(f"more than {options.queue} messages wait for {effect.peer} on '{effect.channel}'")
        flow.waiting.append(parcel)
        self.wake(flow.leave)
