"""Groups of machines in the in-memory driver, and what must be true of them after any history."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.machine import AverageResult, ChainGroup, Contribution
from p2pml.protocols.chainsgd.schedule import ChainScheduler, RandomScheduler, Scheduler, TreeScheduler
from p2pml.wire.tensors import Tensor
from tests.driver import Answer, Cluster
from tests.unit.chainsgd.models import SHAPES, Model, assert_is_mean, bits, copy, make_model

SCHEDULERS: dict[str, Callable[[int], Scheduler]] = {
    "tree": lambda seed: TreeScheduler(),
    "chain": lambda seed: ChainScheduler(),
    "random": lambda seed: RandomScheduler(random.Random(seed)),
}
SMALL = {"weight": ("float32", (40,)), "steps": ("int64", ()), "half": ("bfloat16", (24,))}


class Group:
    """Peers p0 (with the agent) to pN-1 in a `Cluster`, each with a model of its own."""

    def __init__(
        self,
        count: int,
        seed: int = 0,
        *,
        scheduler: str = "tree",
        shapes: Any = SHAPES,
        machine: type[ChainGroup] = ChainGroup,
        cluster: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.shapes = shapes
        self.models: dict[str, Model] = {f"p{index}": make_model(index, shapes) for index in range(count)}
        self.contributed: dict[str, tuple[Model, float]] = {}
        self.options = Options(**{"min_peers": count, "segment_bytes": 64, **options})
        self.machines = {
            peer: machine(
                model,
                agent=None if peer == "p0" else "p0",
                options=self.options,
                scheduler=SCHEDULERS[scheduler](seed),
            )
            for peer, model in self.models.items()
        }
        self.cluster = Cluster(self.machines, seed, **(cluster or {}))

    def join(self, peer: str, seed: int = 50) -> Answer:
        """Another peer, with a model of its own."""
        self.models[peer] = make_model(seed, self.shapes)
        self.machines[peer] = ChainGroup(self.models[peer], agent="p0")
        self.cluster.join(peer, self.machines[peer])
        return self.cluster.command(peer, "joined")

    def formed(self) -> None:
        """Run until all are members."""
        answers = [self.cluster.command(peer, "joined") for peer in self.cluster.alive]
        self.cluster.run(until=lambda: all(answer.done for answer in answers))

    def train(self, peers: Iterable[str], seed: int) -> None:
        """Give peers new values in their tensors, different for each."""
        for peer in peers:
            for name, tensor in make_model(seed + 1000 * int(peer[1:]), self.shapes).items():
                mine = self.models[peer][name]
                if isinstance(tensor, Tensor):
                    mine.data[:] = tensor.data
                else:
                    np.copyto(mine, tensor)

    def contribute(
        self, peers: Iterable[str], seed: int = 1, weight: Callable[[int], float] = float
    ) -> dict[str, Answer]:
        """New values for all of `peers`, and the command to average them; the weight is by the peer's number, from 1."""
        peers = list(peers)
        self.train(peers, seed)
        answers = {}
        for peer in peers:
            theta = weight(int(peer[1:]) + 1)
            self.contributed[peer] = (copy(self.models[peer]), theta)
            answers[peer] = self.cluster.command(peer, "average", Contribution(weight=theta))
        return answers

    def run(self, answers: dict[str, Answer]) -> None:
        """Run until every peer that lives has its answer."""
        self.cluster.run(until=lambda: all(answers[peer].done for peer in self.cluster.alive if peer in answers))

    def closed(self, index: int = -1) -> dict[str, Any]:
        """The agent's report of a closed round."""
        return dict([report for report in self.cluster.reports["p0"] if report.name == "closed"][index].fields)

    def assert_averaged(self, answers: dict[str, Answer], contributors: Iterable[str] | None = None) -> None:
        """All peers that live have the same bits, which are the mean of the `contributors`' (by default, the closed round's)."""
        living = [peer for peer in self.cluster.alive if peer in answers]
        results = [answers[peer].result() for peer in living]
        chosen = list(contributors if contributors is not None else self.closed()["contributors"])
        assert len({tuple(sorted(bits(self.models[peer]).items())) for peer in living}) == 1
        models, weights = zip(*(self.contributed[peer] for peer in chosen), strict=True)
        assert_is_mean(self.models[living[0]], models, weights)
        for peer, result in zip(living, results, strict=True):
            assert isinstance(result, AverageResult)
            assert abs(result.weight - sum(weights)) <= 1e-9 * sum(weights)
            assert result.counted == (peer in chosen)
