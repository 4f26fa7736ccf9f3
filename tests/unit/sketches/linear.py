"""The linear models that the sketches train: pure numpy, no messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Model = dict[str, Array]
RATE = np.float32(0.05)


def local_step(model: Model, x: Array, y: Array) -> tuple[float, Array, Array]:
    """One step against the auxiliary head, in place. Returns the loss, the activations before the step, the labels."""
    hidden = x @ model["front"]
    error = hidden @ model["head"] - y
    gradient = x.T @ (error @ model["head"].T) / len(x)
    model["head"] -= RATE * hidden.T @ error / len(x)
    model["front"] -= RATE * gradient
    return float((error**2).mean()), hidden, y


def server_step(back: Array, x: Array, y: Array) -> float:
    """One step of the back, in place. Returns the loss."""
    error = x @ back - y
    back -= RATE * x.T @ error / len(x)
    return float((error**2).mean())


def merge(mine: Model, other: Model, alpha: float) -> Model:
    """A new model: the old one may still be on its way to a device."""
    return {name: np.float32(alpha) * other[name] + np.float32(1 - alpha) * mine[name] for name in mine}


def arrays(tensors: Mapping[str, Any]) -> Model:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def gradient_of(weights: Array, x: Array, y: Array) -> tuple[Array, float]:
    error = x @ weights - y
    return (x.T @ error / np.float32(len(x))).astype(np.float32), float((error**2).mean())


def largest(gradient: Array, count: int) -> tuple[Array, Array]:
    """Indices and values of the `count` largest entries (Max N for one variable; ties by index)."""
    order = np.argsort(-np.abs(gradient), kind="stable")[:count]
    indices = np.sort(order).astype(np.int32)
    return indices, gradient[indices]  # type: ignore[return-value]
