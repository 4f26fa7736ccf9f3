"""Examples with their targets, and how they are dealt to peers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from p2pml.protocols.training._torch import torch
from p2pml.protocols.training.errors import TaskError

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Examples: `inputs` (N, ...) and `targets` (N, ...), e.g. int64 class indices (N,)."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, inputs: ArrayLike, targets: ArrayLike) -> Data:
        """From arrays, whose memory is copied."""
        return cls(torch.from_numpy(np.array(inputs)), torch.from_numpy(np.array(targets)))

    def __len__(self) -> int:
        return len(self.inputs)

    def subset(self, indices: Any) -> Data:
        """The examples at `indices`, in that order: integers, or a mask of N booleans."""
        chosen = torch.as_tensor(indices)
        if not len(chosen):  # an empty list has no type of its own
            chosen = chosen.long()
        return Data(self.inputs[chosen], self.targets[chosen])


def deal_evenly(items: ArrayLike, part: int, parts: int) -> NDArray[Any]:
    """The share of `part` (0 to parts - 1) of items dealt in order, in runs whose lengths differ by one at most.

    Raises `TaskError` if there is no such part, or there are fewer items than parts.
    """
    items = np.asarray(items)
    if not 0 <= part < parts:
        raise TaskError(f"there is no part {part} of {parts} (parts are numbered from 0)")
    if parts > len(items):
        raise TaskError(f"the training data can be dealt to {len(items)} peers at most, not to {parts}")
    return np.array_split(items, parts)[part]


def stratified_split(labels: ArrayLike, test: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Indices of train and test examples, both sorted, so that each class has its share of the `test` test examples."""
    labels = np.asarray(labels)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    # Every n-th of the examples sorted by class: each class gets its share to within one example.
    chosen = by_class[(np.arange(test) * len(labels) + len(labels) // 2) // test]
    return np.setdiff1d(np.arange(len(labels)), chosen), np.sort(chosen)


def dirichlet_partition(
    labels: ArrayLike, parts: int, alpha: float, rng: np.random.Generator, least: int = 1
) -> list[Indices]:
    """Deal examples so that peers differ in their classes: for each class, shares are drawn from Dirichlet(alpha).

    A small `alpha` (0.1) gives each peer few classes, a large one (100) the same mix to all (Hsu et al., arXiv
    1909.06335). Every example goes to exactly one peer. A peer that got fewer than `least` is given examples of whoever
    has the most at the time. Returns sorted indices for each peer; raises `TaskError` if there are too few examples or
    alpha is not positive.
    """
    labels = np.asarray(labels)
    if parts < 1 or least * parts > len(labels):
        raise TaskError(f"{len(labels)} examples cannot be dealt to {parts} peers with at least {least} each")
    if not (alpha > 0 and np.isfinite(alpha)):
        raise TaskError(f"a Dirichlet partition needs a positive, finite alpha, not {alpha}")
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        bounds = (np.cumsum(rng.dirichlet(np.full(parts, alpha)))[:-1] * len(members)).round().astype(np.int64)
        owner[members] = np.searchsorted(bounds, np.arange(len(members)), side="right")
    sizes = np.bincount(owner, minlength=parts)
    for poor in range(parts):
        while sizes[poor] < least:
            rich = int(sizes.argmax())
            count = min(least - sizes[poor], sizes[rich] - least)
            moved = rng.choice(np.flatnonzero(owner == rich), count, replace=False)
            owner[moved] = poor
            sizes = np.bincount(owner, minlength=parts)
    return [np.flatnonzero(owner == part) for part in range(parts)]
