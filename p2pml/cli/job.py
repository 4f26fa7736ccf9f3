"""What a group trains, as the peer that opened it tells those who join: the task, how, and whose is which part of the data.

It travels in the nodes' announcements, before there is any state machine: a joiner learns from it what to load. A task's
name is not trusted to choose code: a joiner loads shipped tasks, and its user's own only when its user named the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from p2pml.cli.options import Part
from p2pml.errors import P2PMLError
from p2pml.node import Node
from p2pml.peer import Peer

Weighting = Literal["equal", "samples"]
Combine = Literal["parameters", "delta"]

JOB, WISH = "job", "part"
"""Keys of the announcements: the opener's, and the joiners' (the part they want, empty for any)."""


class JobRefused(P2PMLError):
    """A peer cannot take part in a group's training; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """See the arguments of ``p2pml start``. parts: how many the data is dealt in. rounds_before: those of an earlier run."""

    task: str
    parts: int
    rounds: int | None = None
    rounds_before: int = 0
    steps_per_round: int | None = None
    weighting: Weighting = "equal"
    combine: Combine = "parameters"
    seed: int = 0

    @classmethod
    def read(cls, told: object) -> Job:
        """From what a peer announced, which may be anything. Raises `JobRefused`."""
        if isinstance(told, Mapping):
            values: dict[str, Any] = {field.name: told.get(field.name) for field in fields(cls)}
            numbers = [values[key] for key in ("parts", "seed", "rounds_before")]
            optional = [values[key] for key in ("rounds", "steps_per_round") if values[key] is not None]
            fine = all(type(number) is int and 0 <= number < 1 << 31 for number in numbers + optional)
            fine = fine and isinstance(values["task"], str) and values["parts"] > 0
            if fine and values["weighting"] in get_args(Weighting) and values["combine"] in get_args(Combine):
                return cls(**values)
        raise JobRefused("what the group trains is described in a way that this p2pml doesn't understand")


class Dealer:
    """Deals the parts of the training data to the peers that come to `node`, and announces who got which.

    A joiner gets the part that it wishes, or the one that the fewest have. Whoever leaves gives its part back.
    """

    def __init__(self, node: Node, job: Job, own: int | None = None) -> None:
        self._node = node
        self._job = job
        self.dealt: dict[str, int] = {node.id: own or 0}
        self._refused: dict[str, str] = {}
        self.close = node.watch(self._watch)
        self._announce()

    @property
    def own(self) -> int:
        """The part of the node itself."""
        return self.dealt[self._node.id]

    def _announce(self) -> None:
        self._node.announce(JOB, {**asdict(self._job), "dealt": dict(self.dealt), "refused": dict(self._refused)})

    def _watch(self, what: str, peer: Peer, detail: Any) -> None:
        if what == "left":
            if self.dealt.pop(peer.id, None) is not None or self._refused.pop(peer.id, None) is not None:
                self._announce()
        elif peer.id not in self.dealt and peer.id not in self._refused and isinstance(peer.meta.get(WISH), list):
            self._deal(peer.id, peer.meta[WISH])
            self._announce()

    def _deal(self, peer: str, wish: list[Any]) -> None:
        parts = self._job.parts
        if not wish:
            held = Counter(self.dealt.values())
            self.dealt[peer] = min(range(parts), key=lambda part: held[part])
        elif len(wish) != 2 or any(type(number) is not int for number in wish) or not 0 <= wish[0] < wish[1]:
            self._refused[peer] = "it asked for a part of the data in a way that this p2pml doesn't understand"
        elif wish[1] != parts:
            self._refused[peer] = f"the group's data is dealt in {parts} parts, not in {wish[1]}"
        else:
            self.dealt[peer] = wish[0]


async def receive_job(node: Node, opener: Peer) -> tuple[Job, int]:
    """What the group of `opener` trains, and the part (from 0) of the data that is this node's.

    The node must have announced its wish (`announce_wish`) before it dialed. Raises `JobRefused`.
    """
    if JOB not in opener.meta:
        raise JobRefused(f"{opener.id} opened no group: join the address that `p2pml start` printed")
    changed = asyncio.Event()
    end = node.watch(lambda what, peer, detail: changed.set())
    try:
        while True:
            told = opener.meta[JOB]
            job = Job.read(told)
            part, reason = (_entry(told, key, node.id) for key in ("dealt", "refused"))
            if isinstance(reason, str):
                raise JobRefused(f"{opener.id} refused: {reason}")
            if type(part) is int and 0 <= part < job.parts:
                announce_wish(node, (part, job.parts))  # the same one again after a cut
                return job, part
            if opener.link.session.is_closed:
                raise JobRefused(f"{opener.id} left before it dealt a part of the data: {opener.link.error}")
            await changed.wait()
            changed.clear()
    finally:
        end()


def announce_wish(node: Node, wish: Part | None) -> None:
    """Tell whoever deals the data which part this node wants; None is any."""
    node.announce(WISH, list(wish or ()))


def _entry(told: Mapping[str, Any], key: str, peer: str) -> object:
    table = told.get(key)
    return table.get(peer) if isinstance(table, Mapping) else None
