"""Task, data and model of one peer, made the same way for a group's peers and for what they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2pml.protocols.training.data import Data
    from p2pml.protocols.training.task import Task
    from p2pml.protocols.training.trainer import Trainer


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """A trainer with its own part of the training data, and the data that nobody trains on."""

    task: Task
    trainer: Trainer
    held_out: Data


def make_trainee(task_name: str, part: int, parts: int, seed: int, *, threads: int | None = None) -> Trainee:
    """Load and check everything, which takes seconds. The model's first values follow from `seed` alone.

    Raises `TaskError`, `MissingExtra`.
    """
    from p2pml.protocols.training.loading import check_task, load_task
    from p2pml.protocols.training.trainer import Trainer

    task = load_task(task_name)
    check_task(task, part, parts)
    data = task.data(part, parts)
    # Peers of one group must not shuffle alike; any number far from that of other seeds will do.
    trainer = Trainer(task, data, task.make_model(seed), seed=seed * 1_000_003 + part, threads=threads)
    return Trainee(task, trainer, task.test())
