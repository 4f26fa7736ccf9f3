from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.training import ChainSGD, TrainingEnd
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TrainingError
from p2pml.protocols.training.task import Task
from p2pml.protocols.training.tensors import state_tensors
from p2pml.protocols.training.trainer import Trainer
from tests.driver import Cluster

CENTRES = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0]])
ROUNDS = 3


def blobs(count: int, seed: int) -> Data:
    labels = torch.arange(count) % 3
    return Data(CENTRES[labels] + torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)), labels)


TASK = Task(
    name="blobs",
    model=lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    data=lambda part, parts: blobs(60, part),
    test=lambda: blobs(90, 99),
    classes=3,
    batch_size=10,
)
Recorded = dict[tuple[str, int, str], tuple[dict[str, torch.Tensor], float]]


class Training:
    """Peers that train, what they recorded, and the cluster they are in."""

    def __init__(
        self, count: int, *, sizes: Mapping[int, int] | None = None, options: Options | None = None, **more: Any
    ) -> None:
        cluster = more.pop("cluster", {})
        self.recorded: Recorded = {}
        self.machines: dict[str, ChainSGD] = {}
        for index in range(count):
            peer = f"p{index}"
            data = blobs((sizes or {}).get(index, 60), index)
            trainer = Trainer(TASK, data, TASK.make_model(index), seed=index, threads=1)
            self.machines[peer] = ChainSGD(
                trainer,
                TASK.test(),
                agent=None if index == 0 else "p0",
                options=options or Options(min_peers=count, segment_bytes=128),
                record=lambda kind, round_, tensors, weight, peer=peer: self.keep(kind, round_, peer, tensors, weight),  # type: ignore[misc]
                **{"rounds": ROUNDS, **more},
            )
        self.cluster = Cluster(self.machines, 7, **cluster)

    def keep(self, kind: str, round_: int, peer: str, tensors: Mapping[str, Any], weight: float) -> None:
        self.recorded[kind, round_, peer] = ({name: tensor.clone() for name, tensor in tensors.items()}, weight)

    def run(self) -> dict[str, TrainingEnd]:
        self.cluster.run(until=lambda: self.cluster.finished())
        return {peer: self.cluster.result(peer) for peer in self.cluster.alive}

    def model(self, peer: str) -> dict[str, torch.Tensor]:
        return state_tensors(self.machines[peer].trainer.model)

    def assert_equal_models(self, *peers: str) -> None:
        for peer in peers or self.cluster.alive:
            for name, tensor in self.model(peer).items():
                assert torch.equal(tensor, self.model("p0")[name]), (peer, name)


@pytest.mark.parametrize("combine", ["parameters", "delta"])
@pytest.mark.parametrize("weighting", ["equal", "samples"])
def test_peers_train_by_rounds_and_end_with_one_model(combine: str, weighting: str) -> None:
    training = Training(4, combine=combine, weighting=weighting, sizes={1: 30})
    ends = training.run()
    training.assert_equal_models()
    for end in ends.values():
        assert end.end.reason == f"all {ROUNDS} rounds are done"
        assert [fields["round"] for fields in end.rounds] == [1, 2, 3]
        assert end.rounds[-1]["accuracy"] > 0.9
        assert end.rounds[-1]["loss"] < end.rounds[0]["loss"]
        assert all(fields["counted"] and fields["members"] == 4 for fields in end.rounds)
    weights = (
        {"p0": 60.0, "p1": 30.0, "p2": 60.0, "p3": 60.0}
        if weighting == "samples"
        else dict.fromkeys(training.machines, 1.0)
    )
    for round_ in range(1, ROUNDS + 1):
        given = {peer: training.recorded["contribution", round_, peer] for peer in training.machines}
        assert {peer: weight for peer, (_, weight) in given.items()} == weights
        for peer in training.machines:
            result, total = training.recorded["result", round_, peer]
            assert total == sum(weights.values())
            for name, tensor in result.items():
                mean = sum(weight * tensors[name].double() for tensors, weight in given.values()) / total
                if tensor.is_floating_point():
                    assert torch.allclose(tensor.double(), mean, atol=1e-5, rtol=1e-5), name
                else:
                    assert tensor.item() == round(mean.item())


def test_deltas_and_parameters_come_to_the_same() -> None:
    trainings = [Training(3, combine=combine, rounds=2) for combine in ("parameters", "delta")]
    for training in trainings:
        training.run()
    for name, tensor in trainings[0].model("p0").items():
        assert torch.allclose(tensor, trainings[1].model("p0")[name], atol=1e-4), name


def test_rounds_are_reported_with_what_evaluation_gives() -> None:
    training = Training(2, rounds=1, steps_per_round=4)
    training.run()
    (fields,) = [report.fields for report in training.cluster.reports["p1"] if report.name == "round"]
    assert fields["samples"] == 40
    assert {"round", "loss", "seconds", "weight", "accuracy", "held_out_loss"} <= fields.keys()


def test_one_peer_alone_trains() -> None:
    ends = Training(1, options=Options(min_peers=1)).run()
    assert ends["p0"].rounds[-1]["accuracy"] > 0.9


@pytest.mark.parametrize("combine", ["parameters", "delta"])
def test_a_peer_that_joins_late_and_one_that_dies(combine: str) -> None:
    training = Training(
        4,
        combine=combine,
        rounds=6,
        options=Options(min_peers=3),
        cluster={"memory": "late", "pace": {f"p{i}": 1e-3 for i in range(5)}},
    )
    late = training.machines.pop("p3")
    training.cluster = Cluster(training.machines, 3, memory="late", pace={f"p{index}": 1e-3 for index in range(4)})
    reached = lambda number: len(training.machines["p0"].history) >= number  # noqa: E731
    training.cluster.run(until=lambda: reached(1))
    training.machines["p3"] = late
    training.cluster.join("p3", late)
    training.cluster.run(until=lambda: reached(3))
    training.cluster.kill("p1")
    ends = training.run()
    training.assert_equal_models("p0", "p2", "p3")
    assert ends["p3"].rounds[0]["round"] in (2, 3, 4)
    assert ends["p3"].rounds[-1]["accuracy"] > 0.9


@pytest.mark.parametrize("combine", ["parameters", "delta"])
def test_a_slow_peer_is_left_out_and_has_the_groups_model_when_it_is_through(combine: str) -> None:
    pace = {"p0": 1e-3, "p1": 1e-3, "p2": 10e-3}  # 60 samples a round: 0.06 s, and 0.6 s
    training = Training(
        3,
        combine=combine,
        rounds=30,
        options=Options(min_peers=3, round_timeout=0.1),
        cluster={"memory": "late", "pace": pace},
    )
    models: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for peer in ("p0", "p2"):

        def keep(result: Any, peer: str = peer, ended: Any = training.machines[peer].round_ended) -> Any:
            models[peer, result.round] = {name: tensor.clone() for name, tensor in training.model(peer).items()}
            return ended(result)

        training.machines[peer].round_ended = keep  # type: ignore[method-assign]
    slow = training.machines["p2"]
    training.cluster.run(until=lambda: len(slow.history) >= 3)
    training.cluster.run(until=lambda: training.cluster.finished("p0", "p1"))
    training.assert_equal_models("p0", "p1")
    assert not any(fields["counted"] for fields in slow.history[:3])
    for fields in slow.history:
        for name, tensor in models["p2", fields["round"]].items():
            assert torch.equal(tensor, models["p0", fields["round"]][name]), (fields, name)


def test_a_loss_that_is_not_finite_ends_that_peer_and_the_others_go_on() -> None:
    training = Training(3, rounds=2, cluster={"memory": "late", "tolerant": True})
    data = training.machines["p2"].trainer.data
    data.inputs[:] = float("nan")
    ends = training.run()
    assert set(ends) == {"p0", "p1"}
    with pytest.raises(Exception, match="the loss is nan") as caught:
        training.cluster.result("p2")
    assert isinstance(caught.value.__cause__, TrainingError) or "TrainingError" in str(caught.value)
    training.assert_equal_models("p0", "p1")
    assert ends["p0"].rounds[-1]["members"] == 2


def test_unknown_ways_to_combine_are_refused() -> None:
    trainer = Trainer(TASK, blobs(30, 1), TASK.make_model(1), seed=1)
    with pytest.raises(ValueError, match="'parameters' or 'delta'"):
        ChainSGD(trainer, combine="gradients")  # type: ignore[arg-type]
