from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.task import Task

MakeTask = Callable[..., Task]


def test_the_same_seed_makes_the_same_model_and_leaves_the_global_state(make_task: MakeTask) -> None:
    task = make_task()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one, two, other = task.make_model(1), task.make_model(1), task.make_model(2)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(one.weight, two.weight)
    assert not torch.equal(one.weight, other.weight)


def test_models_made_in_threads_at_a_time_are_the_same(make_task: MakeTask) -> None:
    task = make_task(model=lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))))
    with ThreadPoolExecutor(8) as pool:
        models = list(pool.map(lambda _: task.make_model(3), range(16)))
    first = torch.cat([parameter.flatten() for parameter in models[0].parameters()])
    for model in models:
        assert torch.equal(torch.cat([parameter.flatten() for parameter in model.parameters()]), first)


def test_a_factory_that_makes_no_model(make_task: MakeTask) -> None:
    with pytest.raises(TaskError, match=r"task blobs: model\(\) returned dict"):
        make_task(model=dict).make_model(0)


def test_metrics_are_accuracy_nothing_or_the_tasks_own(make_task: MakeTask) -> None:
    outputs, targets = torch.eye(3), torch.tensor([0, 1, 1])
    assert make_task().measure(outputs, targets) == {"accuracy": pytest.approx(2 / 3)}
    assert make_task(classes=None).measure(outputs, targets) == {}
    assert make_task(metrics=lambda o, t: {"sum": o.sum()}).measure(outputs, targets) == {"sum": 3.0}
