"""What is trained: a `Task` joins model, data, loss and metrics, and says how to train them well.

A user's own is a function that returns one, found by `p2pml.protocols.training.loading.load_task`::

    def digits() -> Task:
        return Task(
            name="digits",
            model=lambda: nn.Linear(64, 10),
            data=lambda part, parts: train.subset(deal_evenly(range(len(train)), part, parts)),
            test=lambda: held_out,
            classes=10,
        )
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TaskError

_seeding = threading.Lock()  # torch's layers draw from its one global generator


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Stochastic gradient descent with learning rate 0.05 and momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def cosine(progress: float) -> float:
    """A factor of the learning rate that falls from 1 to 0 along half a cosine as `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def constant(progress: float) -> float:
    """A learning rate that stays what it is."""
    return 1.0


def classification(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The share of examples, 0 to 1, whose highest output (N, classes) is that of their class (N,)."""
    return {"accuracy": float((outputs.argmax(1) == targets).double().mean())}


def error_only(outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """No metrics beside the loss."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that training needs to know, and nothing of how peers work together.

    name: for people, in reports and errors.
    model: makes a new model; use `make_model`, which seeds it.
    data: the training data of peer `part` (from 0) of `parts`. Each peer calls it for its own only. Deterministic.
    test: held-out data, which no peer trains on.
    loss: a scalar from outputs and targets, the mean over the batch.
    metrics: figures from all outputs and targets of a data set; `evaluate` adds the loss. By default the accuracy if
        `classes` is given, else nothing.
    classes: for classification, how many: targets must be integers below it.
    optimizer: makes the optimizer for a model's parameters.
    schedule: a factor of the learning rate by progress, 0 to 1.
    augment: changes a batch's inputs before training on them, with the generator's randomness only.
    batch_size, epochs: defaults for each peer.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int, int], Data]
    test: Callable[[], Data]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = nn.functional.cross_entropy
    metrics: Callable[[torch.Tensor, torch.Tensor], Mapping[str, float]] | None = None
    classes: int | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd
    schedule: Callable[[float], float] = constant
    augment: Callable[[torch.Tensor, torch.Generator], torch.Tensor] | None = None
    batch_size: int = 32
    epochs: int = 15

    def make_model(self, seed: int) -> nn.Module:
        """A new model, the same for the same seed; torch's global random state is left as it was."""
        with _seeding, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
        if not isinstance(model, nn.Module):
            raise TaskError(f"task {self.name}: model() returned {type(model).__name__}, not a torch.nn.Module")
        return model

    def measure(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        """The metrics of this task, without the loss."""
        metrics = self.metrics or (error_only if self.classes is None else classification)
        return {name: float(value) for name, value in metrics(outputs, targets).items()}
