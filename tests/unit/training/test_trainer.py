from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TaskError, TrainingError
from p2pml.protocols.training.evaluation import evaluate
from p2pml.protocols.training.task import Task, cosine
from p2pml.protocols.training.tensors import state_tensors
from p2pml.protocols.training.trainer import Trainer

MakeTask = Callable[..., Task]


def trainer_of(task: Task, seed: int = 0, **options: Any) -> Trainer:
    return Trainer(task, task.data(0, 1), task.make_model(0), seed=seed, **options)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(state_tensors(one).values(), state_tensors(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_training_lowers_the_loss_and_learns(make_task: MakeTask) -> None:
    task = make_task()
    trainer = trainer_of(task)
    first = trainer.epoch()
    for _ in range(4):
        last = trainer.epoch()
    assert last.loss < first.loss
    assert trainer.evaluate(task.test())["accuracy"] > 0.9


def test_the_result_says_what_was_done(make_task: MakeTask) -> None:
    trainer = trainer_of(make_task())
    result = trainer.steps(3)
    assert (result.steps, result.samples) == (3, 24)
    assert result.seconds > 0
    assert trainer.steps_done == 3
    assert trainer.epoch().steps == trainer.steps_per_epoch == 90 // 8
    nothing = trainer.steps(0)
    assert nothing.samples == 0
    assert math.isnan(nothing.loss)


def test_the_same_seed_gives_the_same_model_however_steps_are_cut(make_task: MakeTask) -> None:
    task = make_task()
    whole, pieces, another = trainer_of(task), trainer_of(task), trainer_of(task, seed=1)
    whole.steps(30)
    for count in (1, 4, 25):
        torch.rand(5)  # the global generator has no part in it
        pieces.steps(count)
    another.steps(30)
    assert same(whole.model, pieces.model)
    assert not same(whole.model, another.model)


def test_the_same_seed_gives_the_same_model_in_threads_at_a_time(make_task: MakeTask) -> None:
    task = make_task()
    trainers = [trainer_of(task, threads=1) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda trainer: trainer.steps(40), trainers))
    assert all(same(trainers[0].model, trainer.model) for trainer in trainers)


def test_threads_are_set_in_the_thread_that_trains(make_task: MakeTask) -> None:
    task = make_task()

    def work(threads: int | None) -> int:
        trainer_of(task, threads=threads).steps(1)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert [pool.submit(work, threads).result() for threads in (2, 1, None)] == [2, 1, 1]
    finally:
        torch.set_num_threads(before)


@given(st.integers(1, 20), st.lists(st.integers(1, 25), min_size=1, max_size=30))
def test_every_example_is_seen_equally_often_whatever_the_batch_size(count: int, sizes: list[int]) -> None:
    seen: Counter[int] = Counter(dict.fromkeys(range(count), 0))

    def remember(inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        seen.update(inputs[:, 0].int().tolist())
        return inputs

    data = Data(torch.arange(count).float()[:, None], torch.zeros(count, dtype=torch.int64))
    task = Task(name="t", model=lambda: nn.Linear(1, 2), data=lambda *_: data, test=lambda: data, augment=remember)
    trainer = trainer_of(task)
    for size in sizes:
        trainer.batch_size = size
        assert trainer.backward().samples == trainer.batch_size == min(size, count)
    assert max(seen.values()) - min(seen.values()) <= 1


def test_augmentation_changes_the_inputs_by_the_trainers_randomness_alone(make_task: MakeTask) -> None:
    def jitter(inputs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return inputs + torch.randn(inputs.shape, generator=generator)

    plain, one, two = (trainer_of(make_task(augment=augment)) for augment in (None, jitter, jitter))
    for trainer in (plain, one, two):
        trainer.steps(5)
    assert same(one.model, two.model)
    assert not same(plain.model, one.model)
    assert torch.equal(one.data.inputs, plain.data.inputs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error_and_the_step_is_not_taken(make_task: MakeTask, value: float) -> None:
    calls = 0

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result = nn.functional.cross_entropy(outputs, targets)
        return result * value if calls == 3 else result

    task = make_task(loss=loss)
    trainer, reference = trainer_of(task), trainer_of(make_task())
    with pytest.raises(TrainingError, match=f"task blobs: the loss is {value} at local step 3"):
        trainer.steps(5)
    reference.steps(2)
    assert same(trainer.model, reference.model)


def test_half_steps_make_a_step(make_task: MakeTask) -> None:
    task = make_task()
    whole, halves = trainer_of(task), trainer_of(task)
    whole.steps(2)
    for _ in range(2):
        before = [parameter.clone() for parameter in halves.model.parameters()]
        halves.backward()
        assert all(map(torch.equal, before, halves.model.parameters()))
        assert all(parameter.grad is not None for parameter in halves.model.parameters())
        halves.apply()
    assert same(whole.model, halves.model)


def test_the_schedule_sets_the_learning_rate_by_progress(make_task: MakeTask) -> None:
    trainer = trainer_of(make_task(schedule=cosine))
    rates = []
    for progress in (0.0, 0.5, 1.0, 0.0, 7.0):
        trainer.steps(1, progress)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.025, 0.0, 0.05, 0.0])


@pytest.mark.parametrize("keep", [True, False])
def test_momentum_is_kept_or_not_when_the_model_is_replaced(make_task: MakeTask, keep: bool) -> None:
    trainer = trainer_of(make_task(), keep_optimizer_state=keep)
    trainer.steps(3)
    assert trainer.optimizer.state
    trainer.model_replaced()
    assert bool(trainer.optimizer.state) == keep
    trainer.steps(1)  # and the new optimizer is the one of this model
    assert trainer.optimizer.state


def test_nothing_to_train_on_is_refused(make_task: MakeTask) -> None:
    task = make_task()
    with pytest.raises(TaskError, match="no training data"):
        Trainer(task, task.data(0, 1).subset([]), task.make_model(0), seed=0)
    with pytest.raises(TaskError, match="a batch of 0 examples"):
        trainer_of(task, batch_size=0)


def test_evaluation_does_not_depend_on_the_batch_size_and_leaves_the_model_as_it_was(make_task: MakeTask) -> None:
    task = make_task(model=lambda: nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)))
    trainer = trainer_of(task)
    trainer.steps(20)
    before = {name: tensor.clone() for name, tensor in state_tensors(trainer.model).items()}
    found = [evaluate(task, trainer.model, task.test(), batch_size) for batch_size in (1, 7, 1000)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert trainer.model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_tensors(trainer.model).items())


def test_evaluation_on_known_outputs(make_task: MakeTask) -> None:
    task = make_task(model=nn.Identity)
    data = Data(torch.tensor([[9.0, 0, 0], [9.0, 0, 0], [0, 9.0, 0], [0, 0, 9.0]]), torch.tensor([0, 1, 1, 2]))
    found = evaluate(task, task.make_model(0), data)
    assert found["accuracy"] == 0.75
    assert found["loss"] == pytest.approx(9 / 4, abs=1e-3)  # one of four is wrong by 9
    with pytest.raises(TaskError, match="nothing to evaluate on"):
        evaluate(task, task.make_model(0), data.subset([]))
