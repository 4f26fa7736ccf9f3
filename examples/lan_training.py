"""Train a task of one's own across the machines of a LAN, with the `p2pml` command.

On the first machine, which says what is trained (it prints the address to join)::

    p2pml start --task lan_training:waves --peers 2 --listen tcp://:7700 --insecure

and on each of the others, with this file in the working directory there too, as its code runs there::

    p2pml join tcp://FIRST-MACHINE:7700 --task lan_training:waves --insecure

Here each peer knows sine waves of a few frequencies only, and all of them learn to tell all frequencies apart.
"""

from __future__ import annotations

import torch
from torch import nn

from p2pml.protocols.training.data import Data
from p2pml.protocols.training.task import Task

CLASSES = 4
SAMPLES = 64


def make_waves(count: int, classes: list[int], seed: int) -> Data:
    """Noisy waves (count, 1, SAMPLES) and which of the frequencies each has (count,)."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.tensor(classes)[torch.randint(len(classes), (count,), generator=generator)]
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    time = torch.linspace(0, 6.28, SAMPLES)
    wave = torch.sin((which[:, None] + 1) * time + phase)
    noise = 0.5 * torch.randn(count, SAMPLES, generator=generator)
    return Data((wave + noise)[:, None], which)


def waves() -> Task:
    """The task: a function that returns one is what ``--task module:function`` names."""
    return Task(
        name="waves",
        model=lambda: nn.Sequential(
            nn.Conv1d(1, 16, 15, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(128, CLASSES)
        ),
        # Of two peers the first mostly knows low frequencies, the second high ones: neither could learn the task alone.
        data=lambda part, parts: make_waves(400, [part % CLASSES, (part + 1) % CLASSES, (part + 2) % CLASSES], seed=part),
        test=lambda: make_waves(400, list(range(CLASSES)), seed=999),
        classes=CLASSES,
        epochs=8,
    )
