"""Task, data and model of one peer, made the same way for a group's peers and for what they are compared with.

Importing it imports torch, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2pml.cli.job import Job
from p2pml.protocols.training import checkpoint
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import CheckpointError
from p2pml.protocols.training.loading import check_task, load_task
from p2pml.protocols.training.task import Task
from p2pml.protocols.training.tensors import load_state_tensors, state_tensors
from p2pml.protocols.training.trainer import StepResult, Trainer


@dataclass(frozen=True, slots=True, eq=False)
class Trainee:
    """A trainer with its own part of the training data, and the data that nobody trains on."""

    task: Task
    trainer: GroupTrainer
    held_out: Data


class GroupTrainer(Trainer):
    """A trainer that knows of rounds: it is evaluated at the end of each, in a worker thread, and writes its checkpoint then.

    round: the one under way, for whoever trains to set, counted from where the training began, maybe in an earlier run.
    """

    job: Job
    checkpoint: Path | None = None
    round = 0

    @property
    def rounds(self) -> int:
        """Rounds of the whole training, those before it was resumed too."""
        return self.job.rounds or self.task.epochs

    def steps(self, count: int, progress: float = 0.0) -> StepResult:
        """As `Trainer.steps`; `progress` is that of this run, which may be the continuation of another."""
        before = self.job.rounds_before / self.rounds
        return super().steps(count, before + (1.0 - before) * progress)

    def evaluate(self, data: Data) -> dict[str, float]:
        """As `Trainer.evaluate`, at the end of a round."""
        figures = super().evaluate(data)
        if self.checkpoint is not None:
            meta = {"task": self.job.task, "round": self.round, "rounds": self.rounds, **figures}
            checkpoint.save(self.checkpoint, state_tensors(self.model), meta, self.optimizer)
        return figures

    def resume(self, path: Path) -> None:
        """Take model and optimizer from a checkpoint. Raises `CheckpointError`, `ModelMismatch`."""
        stored = checkpoint.load(path)
        load_state_tensors(self.model, stored.tensors, f"of checkpoint {path}")
        if stored.optimizer is not None:
            self.optimizer.load_state_dict(stored.optimizer)


def make_trainee(job: Job, part: int, *, threads: int | None = None) -> Trainee:
    """Load and check everything, which takes seconds. The model's first values follow from the job's seed alone.

    Raises `TaskError`, `MissingExtra`.
    """
    task = load_task(job.task)
    check_task(task, part, job.parts)
    data = task.data(part, job.parts)
    # Peers of one group must not shuffle alike; any number far from that of other seeds will do.
    trainer = GroupTrainer(task, data, task.make_model(job.seed), seed=job.seed * 1_000_003 + part, threads=threads)
    trainer.job = job
    return Trainee(task, trainer, task.test())


def rounds_in(path: Path, task: str) -> int:
    """How many rounds of `task` the model of a checkpoint has behind it. Raises `CheckpointError`."""
    meta = checkpoint.load(path).meta
    number = meta.get("round")
    if meta.get("task") != task or type(number) is not int or number < 0:
        raise CheckpointError(
            f"checkpoint {path} is of task {meta.get('task')!r}, round {number!r}, not of task '{task}'"
        )
    return number
