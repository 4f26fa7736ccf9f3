"""What a `tests.driver.Cluster` keeps for each machine: the events it is due, timers, computations, commands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from p2pml import statemachine as sm
from p2pml.errors import MachineFailed

if TYPE_CHECKING:
    from tests.driver import Cluster


@dataclass
class Answer:
    """What a `Command` is answered with, some day."""

    done: bool = False
    value: Any = None

    def give(self, value: Any) -> None:
        self.done, self.value = True, value

    def result(self) -> Any:
        """The `Reply`'s value; raises it if it is an exception, and `LookupError` if there is none yet."""
        if not self.done:
            raise LookupError("no Reply yet")
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


class Peer:
    """A machine, and what its driver keeps for it."""

    def __init__(self, cluster: Cluster, name: str, machine: sm.StateMachine) -> None:
        self.cluster, self.name, self.machine = cluster, name, machine
        self.alive = True
        self.failure: MachineFailed | None = None
        self.pending: deque[tuple[sm.Event, object]] = deque()  # with the timer or the link that it is about
        self.members: dict[str, object] = {}  # by the link that each came on
        self.timers: dict[str, object] = {}
        self.lanes: dict[str, Lane] = {}
        self.asked: dict[str, deque[Answer]] = {}
        self.unread: dict[int, Callable[[], None]] = {}  # what gives back the credit of a message, by its event's id

    @property
    def runs(self) -> bool:
        return self.alive and not self.machine.finished

    def feed(self, event: sm.Event, about: object = None) -> None:
        if self.runs:
            self.pending.append((event, about))
            self.cluster.wake(self.take_event)

    def take_event(self) -> bool:
        while self.pending:
            event, about = self.pending.popleft()
            if isinstance(event, sm.TimerFired):
                if about is not None and self.timers.get(event.name) is not about:
                    continue  # cancelled, or set anew, since it was due
                self.timers.pop(event.name, None)
            elif isinstance(event, sm.PeerJoined):
                self.members[event.peer] = about
                self.cluster.wake_way(event.peer, self.name)
            elif isinstance(event, sm.PeerLeft) and self.members.get(event.peer) is about:
                self.members.pop(event.peer, None)
            self.cluster.handle(self, event)
            return True
        return False

    def end(self, error: Exception) -> None:
        """Forget what was to come; `error` is what unanswered commands get."""
        self.pending.clear()
        self.timers.clear()
        self.lanes.clear()
        for answer in [answer for answers in self.asked.values() for answer in answers]:
            answer.give(error)
        self.asked.clear()


class Lane:
    """Computations of one machine that run one after the other."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.jobs: deque[sm.Compute] = deque()
        self.gives_back: deque[Callable[[], None] | None] = deque()  # the credit of what each job consumes
        self.began = 0.0
        self.due = 0.0

    def add(self, job: sm.Compute) -> None:
        self.jobs.append(job)
        self.gives_back.append(self.peer.unread.pop(id(job.consumes), None) if job.consumes is not None else None)
        if len(self.jobs) == 1:
            self._begin()

    def _begin(self) -> None:
        self.began = self.peer.cluster.now
        self.due = self.began + self.jobs[0].cost * self.peer.cluster.pace.get(self.peer.name, 0.0)
        self.peer.cluster.at(self.due, partial(self.peer.cluster.wake, self.run))

    def run(self) -> bool:
        cluster = self.peer.cluster
        if not self.jobs or not self.peer.runs or cluster.now < self.due:
            return False
        job = self.jobs.popleft()
        try:
            result = job.work(*job.arguments)
        except Exception as error:
            self.peer.feed(sm.ComputeFailed(job.tag, error))
        else:
            self.peer.feed(sm.Computed(job.tag, result, cluster.now - self.began))
        if (give_back := self.gives_back.popleft()) is not None:
            give_back()
        cluster.note(f"{self.peer.name} has computed {job.tag!r}")
        if self.jobs:
            self._begin()
        return True


def show(thing: Any) -> str:
    """A dataclass in one short line: no tensors, and no fields that are as they were declared."""
    if thing is None or isinstance(thing, (str, int, float, BaseException)):
        return repr(thing)[:80]
    if isinstance(thing, tuple):
        return f"({', '.join(map(show, thing[:4]))})"
    fields = getattr(thing, "__dataclass_fields__", {})
    told = [(name, getattr(thing, name)) for name, field in fields.items() if getattr(thing, name) is not field.default]
    return f"{type(thing).__name__}({', '.join(f'{name}={show(value)}' for name, value in told)})"
