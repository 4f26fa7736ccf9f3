"""A model's loss and metrics on data that it is not trained on."""

from __future__ import annotations

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.task import Task


def evaluate(task: Task, model: nn.Module, data: Data, batch_size: int = 256) -> dict[str, float]:
    """The task's metrics and the 'loss' of `model` on all of `data`, in batches; a loss may be NaN or infinite here.

    The model is evaluated in its evaluation mode (no dropout, BatchNorm's running statistics) and left in the mode it
    had.
    """
    if not len(data):
        raise TaskError(f"task {task.name}: there is nothing to evaluate on, the data is empty")
    outputs: list[torch.Tensor] = []
    total = 0.0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(data), batch_size):
                batch = slice(start, start + batch_size)
                output = model(data.inputs[batch])
                total += float(task.loss(output, data.targets[batch])) * len(output)
                outputs.append(output)
            return {"loss": total / len(data), **task.measure(torch.cat(outputs), data.targets)}
    finally:
        model.train(was_training)
