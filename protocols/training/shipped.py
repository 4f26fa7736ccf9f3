"""The shipped tasks, small enough for a laptop, on data that is installed with a package."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2pml.protocols.training import datasets
from p2pml.protocols.training._torch import torch
from p2pml.protocols.training.data import Data, deal_evenly, dirichlet_partition, stratified_split
from p2pml.protocols.training.errors import TaskError
from p2pml.protocols.training.models import mnist_cnn, watch_cnn
from p2pml.protocols.training.task import Task, cosine

WATCH_HELD_OUT = (9, 10)
"""The subjects that nobody trains on. The others, 1 to 8, are dealt to the peers in order."""

_MNIST_SPLIT_SEED = 0


def watch() -> Task:
    """Which of seven shoulder exercises a smartwatch sees: inputs (N, 6, 128), targets (N,).

    Each peer has the recordings of its own subjects, two for each of four peers, so that the peers' data differ as
    people do. A window is normalised by itself (`normalise_windows`), which needs nobody else's data, in training or in
    use.
    """

    def data(part: int, parts: int) -> Data:
        known = datasets.watch()
        training = np.setdiff1d(known.subjects, WATCH_HELD_OUT)
        return _windows(known, deal_evenly(training, part, parts))

    def test() -> Data:
        return _windows(datasets.watch(), np.array(WATCH_HELD_OUT))

    return Task(
        name="watch",
        model=watch_cnn,
        data=data,
        test=test,
        classes=len(datasets.WATCH_CLASSES),
        schedule=cosine,
        batch_size=32,
        epochs=15,
    )


def mnist5k(alpha: float | None = None, seed: int = 0) -> Task:
    """Handwritten digits: inputs (N, 1, 28, 28) from 0 to 1, targets (N,); 4000 to train on and 1000 to test, of each
    class as many, always the same.

    Peers get shares of equal size and the same mix, or with `alpha` a Dirichlet partition (see `dirichlet_partition`),
    in both cases as `seed` deals them.
    """

    def data(part: int, parts: int) -> Data:
        train, _ = _digits()
        rng = np.random.default_rng(seed)
        if alpha is None:
            return train.subset(deal_evenly(rng.permutation(len(train)), part, parts))
        if not 0 <= part < parts:
            raise TaskError(f"there is no part {part} of {parts} (parts are numbered from 0)")
        return train.subset(dirichlet_partition(train.targets.numpy(), parts, alpha, rng)[part])

    return Task(
        name="mnist5k",
        model=mnist_cnn,
        data=data,
        test=lambda: _digits()[1],
        classes=10,
        schedule=cosine,
        batch_size=32,
        epochs=5,
    )


def normalise_windows(windows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each channel of each window (N, channels, samples) less its mean, in units of its standard deviation plus 0.1.

    The 0.1 (g, rad/s) keeps a sensor at rest from being blown up to the size of a movement. Strength and the arm's
    attitude are lost, which vary with the person: for people not trained on, it is better than fixed units by 0.09.
    """
    centred = windows - windows.mean(2, keepdims=True)
    normalised: NDArray[np.float32] = centred / (windows.std(2, keepdims=True) + np.float32(0.1))
    return normalised


def _windows(known: datasets.Watch, subjects: NDArray[np.int64]) -> Data:
    chosen = np.isin(known.subjects, subjects)
    return Data.of(normalise_windows(known.windows[chosen]), known.labels[chosen])


def _digits() -> tuple[Data, Data]:
    known = datasets.mnist5k()
    whole = Data(torch.from_numpy(known.images).float() / 255, torch.from_numpy(known.labels))
    train, test = stratified_split(known.labels, 1000, np.random.default_rng(_MNIST_SPLIT_SEED))
    return whole.subset(train), whole.subset(test)
