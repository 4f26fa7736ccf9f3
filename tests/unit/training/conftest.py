from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.data import Data, deal_evenly
from p2pml.protocols.training.task import Task


def blobs(count: int, seed: int) -> Data:
    """Three clouds of points in the plane, which a linear model can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centres = torch.tensor([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0]])
    return Data(centres[labels] + torch.randn(count, 2, generator=generator), labels)


@pytest.fixture
def make_task() -> Callable[..., Task]:
    """Makes a small task of three classes of points; keywords replace fields."""

    def make(**fields: Any) -> Task:
        train, test = blobs(90, 1), blobs(60, 2)
        standard: dict[str, Any] = {
            "name": "blobs",
            "model": lambda: nn.Linear(2, 3),
            "data": lambda part, parts: train.subset(deal_evenly(range(len(train)), part, parts)),
            "test": lambda: test,
            "classes": 3,
            "batch_size": 8,
        }
        return Task(**{**standard, **fields})

    return make
