"""Who sends its model to whom: the mobile agent's schedulers.

A scheduler is asked for pairs at the start of an attempt and after every change, until it names none. Once a device is
told to send it gets no more to merge, so that it can forward each segment as soon as that is merged (Alg. 1: "send,
break"). A scheduler that names a device before it is ready lets segments run through chains of devices; one that waits
for `free` devices reacts to what happens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol


class Phase(Enum):
    """What a device does, as the agent knows it (MDLdroid's states, and `TRAINING` before them)."""

    TRAINING = "training"
    FREE = "free"
    GET = "get"
    SEND = "send"
    DONE = "done"


@dataclass(slots=True)
class Schedule:
    """An attempt as a scheduler sees it.

    contributors: the devices, in the order in which they became members. resources: how much each can take, more is
    better. sends: for each device that was told to send, to whom. ready: who has a contribution. merged: the senders
    whose receivers have merged all they had. aggregations: n_agg, how many merges each device has done.
    """

    contributors: Sequence[str]
    resources: Mapping[str, float] = field(default_factory=dict)
    sends: dict[str, str] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    merged: set[str] = field(default_factory=set)
    aggregations: dict[str, int] = field(default_factory=dict)

    def phase(self, device: str) -> Phase:
        """What `device` does now."""
        if device in self.merged:
            return Phase.DONE
        if device in self.sends:
            return Phase.SEND
        if any(receiver == device for _, receiver in self.in_flight()):
            return Phase.GET
        return Phase.FREE if device in self.ready else Phase.TRAINING

    def in_flight(self) -> list[tuple[str, str]]:
        """The pairs that are named and not merged."""
        return [(sender, receiver) for sender, receiver in self.sends.items() if sender not in self.merged]

    def remaining(self) -> list[str]:
        """The devices that were not told to send; the last of them is the root."""
        return [device for device in self.contributors if device not in self.sends]

    def name(self, sender: str, receiver: str) -> None:
        """Record a scheduler's pair. Raises `ValueError` for one that the rule above forbids."""
        remaining = self.remaining()
        if sender == receiver or sender not in remaining or receiver not in remaining:
            raise ValueError(f"the scheduler named {sender} to {receiver}: one of them sends already, or is none")
        self.sends[sender] = receiver

    def merge(self, sender: str) -> None:
        """The receiver of `sender` has merged all of it; what is no news changes nothing."""
        if sender in self.sends and sender not in self.merged:
            self.merged.add(sender)
            receiver = self.sends[sender]
            self.aggregations[receiver] = self.aggregations.get(receiver, 0) + 1


class Scheduler(Protocol):
    """Names pairs. One scheduler serves all rounds of a group, one attempt at a time."""

    def begin(self, schedule: Schedule) -> None:
        """A new attempt begins; `schedule` is kept up to date by the agent from now on."""

    def next_pair(self) -> tuple[str, str] | None:
        """The next (sender, receiver), or None for now.

        It must name all pairs but one's worth of devices in the end.
        """


class Ahead:
    """Base of schedulers that name all pairs at the start."""

    def begin(self, schedule: Schedule) -> None:
        """See `Scheduler`."""
        self._pairs = iter(self.pairs(schedule))

    def next_pair(self) -> tuple[str, str] | None:
        """See `Scheduler`."""
        return next(self._pairs, None)

    def pairs(self, schedule: Schedule) -> list[tuple[str, str]]:
        """All pairs of an attempt, each sender after all who send to it."""
        raise NotImplementedError


class TreeScheduler(Ahead):
    """MDLdroid's Tree-scheduler: in round r, ranks that are multiples of 2^(r+1) receive from the rank 2^r above."""

    def pairs(self, schedule: Schedule) -> list[tuple[str, str]]:
        """See `Ahead`."""
        devices, found, step = schedule.contributors, [], 1
        while step < len(devices):
            found += [(devices[at + step], devices[at]) for at in range(0, len(devices) - step, 2 * step)]
            step *= 2
        return found


class ChainScheduler(Ahead):
    """A chain: each device sends to the one before it (MDLdroid's Ring-scheduler, without a return)."""

    def pairs(self, schedule: Schedule) -> list[tuple[str, str]]:
        """See `Ahead`."""
        devices = schedule.contributors
        return [(devices[at], devices[at - 1]) for at in range(len(devices) - 1, 0, -1)]


class RandomScheduler:
    """Random pairs of devices that are free, as many at a time as there are."""

    def __init__(self, generator: random.Random) -> None:
        self._random = generator

    def begin(self, schedule: Schedule) -> None:
        """See `Scheduler`."""
        self._schedule = schedule

    def next_pair(self) -> tuple[str, str] | None:
        """See `Scheduler`."""
        free = [device for device in self._schedule.contributors if self._schedule.phase(device) is Phase.FREE]
        if len(free) < 2:
            return None
        sender, receiver = self._random.sample(free, 2)
        return sender, receiver
