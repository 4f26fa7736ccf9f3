from __future__ import annotations

import numpy as np
import pytest

from p2pml.protocols.training import datasets
from p2pml.protocols.training._torch import torch
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.loading import check_task
from p2pml.protocols.training.shipped import mnist5k, normalise_windows, watch
from p2pml.protocols.training.tensors import state_tensors
from p2pml.protocols.training.trainer import Trainer


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("P2PML_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_each_of_four_peers_has_two_subjects_and_two_are_held_out() -> None:
    known, task = datasets.watch(), watch()
    counts = np.bincount(known.subjects)
    for part in range(4):
        check_task(task, part, 4)
        assert len(task.data(part, 4)) == counts[2 * part + 1] + counts[2 * part + 2]
    assert len(task.test()) == counts[9] + counts[10]
    held_out = torch.from_numpy(normalise_windows(known.windows[known.subjects >= 9]))
    assert torch.equal(task.test().inputs, held_out)


def test_the_subjects_are_enough_for_eight_peers() -> None:
    assert sum(len(watch().data(part, 8)) for part in range(8)) == len(watch().data(0, 1))
    with pytest.raises(TaskError, match="to 8 peers at most, not to 9"):
        watch().data(0, 9)


def test_a_window_is_normalised_by_itself() -> None:
    windows = np.random.default_rng(0).normal(5, 3, (4, 6, 128)).astype(np.float32)
    together = normalise_windows(windows)
    assert np.array_equal(together[2:3], normalise_windows(windows[2:3]))
    assert np.abs(together.mean(2)).max() < 1e-5
    assert together.std(2) == pytest.approx(3 / 3.1, rel=0.2)
    assert np.abs(normalise_windows(np.ones((1, 6, 128), np.float32))).max() == 0


@pytest.mark.parametrize(("task", "parameters"), [(watch(), 45_127), (mnist5k(), 52_436)])
def test_the_models_are_as_small_as_they_say(task: object, parameters: int) -> None:
    model = task.make_model(0)  # type: ignore[attr-defined]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_watch_task_learns_and_its_training_can_be_repeated() -> None:
    task = watch()
    models = []
    for _ in range(2):
        trainer = Trainer(task, task.data(0, 4), task.make_model(0), seed=0, threads=1)
        first, second = trainer.epoch(), trainer.epoch()
        assert second.loss < first.loss
        models.append(state_tensors(trainer.model))
    assert all(torch.equal(one, other) for one, other in zip(models[0].values(), models[1].values(), strict=True))
    assert trainer.evaluate(task.test())["accuracy"] > 0.45  # of seven classes


def test_the_digits_are_split_once_and_for_all() -> None:
    task = mnist5k()
    whole, test = task.data(0, 1), task.test()
    assert (len(whole), len(test)) == (4000, 1000)
    assert torch.bincount(test.targets).tolist() == [100] * 10
    assert float(whole.inputs.min()) == 0.0
    assert float(whole.inputs.max()) == 1.0
    trained_on = {row.numpy().tobytes() for row in whole.inputs}
    assert sum(row.numpy().tobytes() in trained_on for row in test.inputs) == 0


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_the_digits_go_to_one_peer_each(alpha: float | None) -> None:
    task = mnist5k(alpha, seed=3)
    shares = [task.data(part, 5) for part in range(5)]
    assert sum(map(len, shares)) == 4000
    dealt = sorted(row.numpy().tobytes() for share in shares for row in share.inputs)
    assert dealt == sorted(row.numpy().tobytes() for row in task.data(0, 1).inputs)
    assert torch.equal(mnist5k(alpha, seed=3).data(2, 5).targets, shares[2].targets)
    with pytest.raises(TaskError, match="no part 5 of 5"):
        task.data(5, 5)


def test_the_digits_are_learned() -> None:
    task = mnist5k()
    trainer = Trainer(task, task.data(0, 1), task.make_model(0), seed=0, threads=1)
    trainer.epoch()
    assert trainer.evaluate(task.test())["accuracy"] > 0.75
