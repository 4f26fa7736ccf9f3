"""The errors of training, apart from those of networking."""

from __future__ import annotations

from p2pml.errors import P2PMLError


class TaskError(P2PMLError):
    """A task cannot be found, loaded or used as it is; the message names the task and what to mend."""


class TrainingError(P2PMLError):
    """Training went wrong; the message names the task, the step and the loss."""


class ModelMismatch(P2PMLError, ValueError):
    """Two models do not consist of the same tensors; the message names the first that differs and the peer."""


class CheckpointError(P2PMLError):
    """A checkpoint cannot be written or read; the message names the path."""
