"""Tasks by name: shipped ones, and a user's own as ``module:function``; and whether a task can be trained at all."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from p2pml.errors import MissingExtra
from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.task import Task

SHIPPED = ("watch", "mnist5k")


def load_task(name: str) -> Task:
    """The task called `name`: one of `SHIPPED`, or ``module:function``, where the function takes nothing and returns a
    `Task`.

    Modules are looked for in the current directory too. An exception that the user's own code raises comes as the cause
    of the `TaskError`; `MissingExtra` passes through.
    """
    if name in SHIPPED:
        return _call(name, "p2pml.protocols.training.shipped", name)
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise TaskError(f"there is no task '{name}': give one of {', '.join(SHIPPED)}, or your own as module:function")
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # a console script, unlike `python -m`, does not look there
    return _call(name, module, function)


def check_task(task: Task, part: int = 0, parts: int = 1, batch_size: int | None = None) -> None:
    """Find what would go wrong hours later: raises `TaskError` if this peer's data, the test data and the model don't
    fit.

    Reads the data of `part` only and lets a new model look at two test examples.
    """
    where = f"task {task.name}: the training data of part {part} of {parts}"
    size = task.batch_size if batch_size is None else batch_size
    train, test = task.data(part, parts), task.test()
    _check_data(task, train, where)
    _check_data(task, test, f"task {task.name}: the test data")
    if len(train) < size:
        raise TaskError(f"{where}: {len(train)} examples are fewer than a batch of {size}")
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        shapes = f"{tuple(train.inputs.shape[1:])}, but test examples of {tuple(test.inputs.shape[1:])}"
        raise TaskError(f"task {task.name}: training examples have shape {shapes}")
    _check_model(task, task.make_model(0), test.subset(torch.arange(min(2, len(test)))))


def _call(name: str, module: str, function: str) -> Task:
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise TaskError(f"task {name}: module {module} needs {error.name}, which is not installed") from error
        raise TaskError(f"task {name}: there is no module {error.name} (also looked in {os.getcwd()})") from error
    except MissingExtra:
        raise
    except Exception as error:
        raise TaskError(f"task {name}: importing {module} raised {type(error).__name__}: {error}") from error
    make = getattr(found, function, None)
    if make is None:
        raise TaskError(f"task {name}: module {module} ({getattr(found, '__file__', 'built in')}) has no {function}")
    if not callable(make):
        raise TaskError(f"task {name}: {function} in {module} is {type(make).__name__}, not a function")
    try:
        task = make()
    except MissingExtra:
        raise
    except Exception as error:
        raise TaskError(f"task {name}: {function}() raised {type(error).__name__}: {error}") from error
    if not isinstance(task, Task):
        raise TaskError(f"task {name}: {function}() returned {type(task).__name__}, not a p2pml Task")
    return task


def _check_data(task: Task, data: Data, where: str) -> None:
    if not isinstance(data, Data):
        raise TaskError(f"{where} is {type(data).__name__}, not a p2pml Data")
    for field in ("inputs", "targets"):
        tensor = getattr(data, field)
        if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
            raise TaskError(f"{where}: {field} must be a tensor with one row for each example")
        if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
            row = int((~tensor.isfinite()).nonzero()[0, 0])
            raise TaskError(f"{where}: {field} has NaN or infinite values (first in example {row})")
    if len(data.inputs) != len(data.targets):
        raise TaskError(f"{where}: {len(data.inputs)} inputs, but {len(data.targets)} targets")
    if not len(data):
        raise TaskError(f"{where} is empty")
    if task.classes is not None:
        _check_labels(data.targets, task.classes, where)


def _check_labels(labels: torch.Tensor, classes: int, where: str) -> None:
    if labels.dtype != torch.int64 or labels.ndim != 1:
        shape = tuple(labels.shape)
        raise TaskError(f"{where}: class labels must be int64 of shape (N,), not {labels.dtype} of shape {shape}")
    least, most = int(labels.min()), int(labels.max())
    if least < 0 or most >= classes:
        raise TaskError(f"{where}: class labels must be 0 to {classes - 1}, but there are some from {least} to {most}")


def _check_model(task: Task, model: nn.Module, sample: Data) -> None:
    model.eval()
    shape = tuple(sample.inputs.shape)
    try:
        with torch.inference_mode():
            outputs = model(sample.inputs)
            loss = task.loss(outputs, sample.targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise TaskError(f"task {task.name}: model and loss cannot take inputs of shape {shape}: {error}") from error
    if task.classes is not None and outputs.shape[1:] != (task.classes,):
        raise TaskError(f"task {task.name}: the model makes {tuple(outputs.shape)}, not (N, {task.classes} classes)")
    if loss.numel() != 1:
        raise TaskError(f"task {task.name}: the loss must be one number, but has shape {tuple(loss.shape)}")
