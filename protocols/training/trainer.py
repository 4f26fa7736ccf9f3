"""Local training on one peer's data: what a state machine's `Compute` runs in a worker thread."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TaskError, TrainingError
from p2pml.protocols.training.evaluation import evaluate
from p2pml.protocols.training.task import Task


@dataclass(frozen=True, slots=True)
class StepResult:
    """What some local steps did: examples they saw, the mean loss over those, seconds they took."""

    steps: int
    samples: int
    loss: float
    seconds: float


class Trainer:
    """Trains `model` in place on `data`.

    Batches come from an endless run of shuffled passes over the data: where a pass ends within a batch, the batch is
    filled from the next one, so that every example is seen equally often whatever the batch size, which may change at
    any time. All of it follows from `seed`, apart from a model's own dropout, which draws from torch's global
    generator. With the same `threads`, the same seed gives the same model on the same machine.

    threads: how many threads torch uses for each operation, in the thread that calls; None leaves it as it is.
    keep_optimizer_state: whether momentum and the like outlive `model_replaced`.

    Not safe to use from two threads at a time. Raises `TaskError` for data or a batch size of nothing.
    """

    def __init__(
        self,
        task: Task,
        data: Data,
        model: nn.Module,
        *,
        seed: int,
        batch_size: int | None = None,
        threads: int | None = None,
        keep_optimizer_state: bool = True,
    ) -> None:
        if not len(data):
            raise TaskError(f"task {task.name}: there is no training data")
        self.task = task
        self.data = data
        self.model = model
        self.optimizer = task.optimizer(model.parameters())
        self.keep_optimizer_state = keep_optimizer_state
        self.steps_done = 0
        self._threads = threads
        self._generator = torch.Generator().manual_seed(seed)
        self._pass = torch.empty(0, dtype=torch.int64)  # what is left of the current pass over the data
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self.batch_size = task.batch_size if batch_size is None else batch_size

    @property
    def batch_size(self) -> int:
        """Examples in a step: as asked for, but no more than there are."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, wanted: int) -> None:
        if wanted < 1:
            raise TaskError(f"task {self.task.name}: a batch of {wanted} examples is none")
        self._batch_size = min(wanted, len(self.data))

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see each example about once, and none more than once."""
        return len(self.data) // self._batch_size

    def epoch(self, progress: float = 0.0) -> StepResult:
        """`steps_per_epoch` steps; see `steps`."""
        return self.steps(self.steps_per_epoch, progress)

    def steps(self, count: int, progress: float = 0.0) -> StepResult:
        """Take `count` optimizer steps. `progress` is how much of the whole training is done, 0 to 1: it sets the
        learning rate by the task's schedule.

        Raises `TrainingError` on a loss that is not finite; the step that had it is not taken.
        """
        started = time.perf_counter()
        samples, total = 0, 0.0
        for _ in range(count):
            result = self.backward()
            self.apply(progress)
            samples += result.samples
            total += result.loss * result.samples
        loss = total / samples if samples else math.nan
        return StepResult(count, samples, loss, time.perf_counter() - started)

    def backward(self) -> StepResult:
        """Half a step: leave the gradient of the next batch in the parameters' `grad`, and the parameters as they are.

        Raises `TrainingError` on a loss that is not finite.
        """
        started = time.perf_counter()
        self._limit_threads()
        inputs, targets = self._next_batch()
        if self.task.augment is not None:
            inputs = self.task.augment(inputs, self._generator)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model(inputs), targets)
        value = float(loss.item())
        if not math.isfinite(value):
            raise TrainingError(f"task {self.task.name}: the loss is {value} at local step {self.steps_done + 1}")
        loss.backward()  # type: ignore[no-untyped-call]
        return StepResult(0, len(inputs), value, time.perf_counter() - started)

    def apply(self, progress: float = 0.0) -> None:
        """The other half: one optimizer step with the gradients that the parameters have."""
        factor = self.task.schedule(progress)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        self.steps_done += 1

    def model_replaced(self) -> None:
        """To be called when the model's tensors were replaced by others, e.g. the group's: the optimizer starts anew
        unless `keep_optimizer_state`."""
        if not self.keep_optimizer_state:
            self.optimizer = self.task.optimizer(self.model.parameters())

    def evaluate(self, data: Data) -> dict[str, float]:
        """The task's metrics and the loss of the model on `data`."""
        self._limit_threads()
        return evaluate(self.task, self.model, data)

    def _limit_threads(self) -> None:
        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)  # it counts for the calling thread, and workers come and go

    def _next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self._pass) < self._batch_size:
            following = torch.randperm(len(self.data), generator=self._generator)
            self._pass = torch.cat([self._pass, following])
        chosen, self._pass = self._pass[: self._batch_size], self._pass[self._batch_size :]
        return self.data.inputs[chosen], self.data.targets[chosen]
