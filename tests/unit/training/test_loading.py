from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pml.errors import MissingExtra, P2PMLError
from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.loading import check_task, load_task
from p2pml.protocols.training.task import Task

MakeTask = Callable[..., Task]

USERS_MODULE = """
from p2pml.errors import MissingExtra
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.task import Task
from torch import nn, zeros

LIMIT = 3

def good():
    data = Data(zeros(40, 2), zeros(40).long())
    return Task(name="mine", model=lambda: nn.Linear(2, 2), data=lambda part, parts: data, test=lambda: data, classes=2)

def nothing():
    pass

def fails():
    return {}["absent"]

def needs_extra():
    raise MissingExtra.of("seglearn", "data", "mine")

def needs_argument(size):
    pass
"""


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with modules of a user's, which is not on the import path."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "users_task.py").write_text(USERS_MODULE)
    (tmp_path / "users_broken.py").write_text("def (:")
    (tmp_path / "users_needy.py").write_text("import a_package_that_is_nowhere")
    (tmp_path / "users_renamed.py").write_text("from p2pml.protocols.training.task import Tusk")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def test_a_users_own_task_of_the_current_directory() -> None:
    task = load_task("users_task:good")
    assert task.name == "mine"
    check_task(task)


@pytest.mark.parametrize("name", ["watch", "mnist5k"])
def test_a_shipped_task_by_name(name: str) -> None:
    assert load_task(name).name == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wotch", "there is no task 'wotch': give one of watch, mnist5k, or your own as module:function"),
        ("users_task:", "there is no task 'users_task:'"),
        (":good", "there is no task ':good'"),
        ("users_nowhere:good", "there is no module users_nowhere (also looked in"),
        ("users_task.sub:good", "there is no module users_task"),
        ("users_needy:good", "module users_needy needs a_package_that_is_nowhere, which is not installed"),
        ("users_broken:good", "importing users_broken raised SyntaxError"),
        ("users_renamed:good", "importing users_renamed raised ImportError: cannot import name 'Tusk'"),
        ("users_task:god", "has no god"),
        ("users_task:LIMIT", "LIMIT in users_task is int, not a function"),
        ("users_task:nothing", "nothing() returned NoneType, not a p2pml Task"),
        ("users_task:fails", "fails() raised KeyError: 'absent'"),
        ("users_task:needs_argument", "needs_argument() raised TypeError"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(name: str, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        load_task(name)
    assert said in str(caught.value)
    assert isinstance(caught.value, P2PMLError)


def test_a_missing_extra_is_not_wrapped() -> None:
    with pytest.raises(MissingExtra, match="mine needs seglearn"):
        load_task("users_task:needs_extra")


def labelled(inputs: torch.Tensor, targets: list[int]) -> Callable[..., Data]:
    return lambda *_: Data(inputs, torch.tensor(targets))


def with_value(value: float) -> torch.Tensor:
    inputs = torch.zeros(9, 2)
    inputs[4, 1] = value
    return inputs


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": labelled(torch.zeros(9, 2), [0] * 8)}, "part 1 of 2: 9 inputs, but 8 targets"),
        ({"data": labelled(torch.zeros(0, 2), [])}, "the training data of part 1 of 2 is empty"),
        ({"test": labelled(torch.zeros(0, 2), [])}, "the test data is empty"),
        ({"data": labelled(torch.zeros(7, 2), [0] * 7)}, "7 examples are fewer than a batch of 8"),
        ({"data": labelled(with_value(math.nan), [0] * 9)}, "inputs has NaN or infinite values (first in example 4)"),
        ({"test": labelled(with_value(math.inf), [0] * 9)}, "test data: inputs has NaN or infinite values"),
        ({"data": labelled(torch.zeros(9, 2), [0] * 8 + [3])}, "must be 0 to 2, but there are some from 0 to 3"),
        ({"data": labelled(torch.zeros(9, 2), [-1] + [0] * 8)}, "must be 0 to 2, but there are some from -1"),
        ({"data": lambda *_: Data(torch.zeros(9, 2), torch.zeros(9))}, "int64 of shape (N,), not torch.float32"),
        ({"data": lambda *_: Data(torch.zeros(9, 2), torch.zeros(9, 1).long())}, "of shape (9, 1)"),
        ({"data": lambda *_: Data(torch.tensor(1.0), torch.tensor(1))}, "one row for each example"),
        ({"data": lambda *_: Data([1.0], [1])}, "inputs must be a tensor"),  # type: ignore[arg-type,list-item]
        ({"data": lambda *_: (torch.zeros(9, 2), torch.zeros(9))}, "part 1 of 2 is tuple, not a p2pml Data"),
        ({"data": labelled(torch.zeros(9, 3), [0] * 9)}, "have shape (3,), but test examples of (2,)"),
        ({"model": lambda: nn.Linear(5, 3)}, "model and loss cannot take inputs of shape (2, 2): mat1 and mat2"),
        ({"model": lambda: nn.Linear(2, 4)}, "the model makes (2, 4), not (N, 3 classes)"),
        ({"loss": lambda o, t: o}, "the loss must be one number, but has shape (2, 3)"),
        ({"model": dict}, "model() returned dict"),
    ],
)
def test_what_would_go_wrong_later_is_said_at_once(make_task: MakeTask, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError) as caught:
        check_task(make_task(**fields), part=1, parts=2)
    assert said in str(caught.value)
    assert "task blobs" in str(caught.value)


def test_the_batch_size_that_is_used_is_the_one_checked(make_task: MakeTask) -> None:
    task = make_task()
    check_task(task, 0, 2, batch_size=45)
    with pytest.raises(TaskError, match="45 examples are fewer than a batch of 46"):
        check_task(task, 0, 2, batch_size=46)


def test_targets_of_a_regression_may_be_anything_finite(make_task: MakeTask) -> None:
    def data(*_: int) -> Data:
        return Data(torch.randn(20, 2), torch.randn(20, 1))

    task = make_task(data=data, test=data, classes=None, loss=nn.functional.mse_loss, model=lambda: nn.Linear(2, 1))
    check_task(task)
