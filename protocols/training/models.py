"""The shipped tasks' networks: plain chains of named layers, so that they can be cut at any point.

Choices for the motion network were made by cross-validation among the eight training subjects (three peers train, two
subjects are left out in turn): strided convolutions train 1.5 times as fast as pooling and are no worse; BatchNorm is
better than GroupNorm by 0.06, as peers there differ in their people and not in their classes; kernels of 7 are better
than 5 by 0.02 and no worse than 9 or 11.
"""

from __future__ import annotations

from collections import OrderedDict

from p2pml.protocols.training._torch import nn


def watch_cnn(channels: int = 6, classes: int = 7) -> nn.Sequential:
    """A 1-D network for windows of motion, (N, channels, samples) to (N, classes); 45,127 parameters by default."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv1d(channels, 32, 7, stride=2, padding=3, bias=False),
            norm1=nn.BatchNorm1d(32),
            relu1=nn.ReLU(),
            conv2=nn.Conv1d(32, 64, 7, stride=2, padding=3, bias=False),
            norm2=nn.BatchNorm1d(64),
            relu2=nn.ReLU(),
            conv3=nn.Conv1d(64, 64, 7, padding=3, bias=False),
            norm3=nn.BatchNorm1d(64),
            relu3=nn.ReLU(),
            pool=nn.AdaptiveAvgPool1d(1),
            flat=nn.Flatten(),
            head=nn.Linear(64, classes),
        )
    )


def mnist_cnn(classes: int = 10) -> nn.Sequential:
    """A small network for grey images, (N, 1, 28, 28) to (N, classes); 52,436 parameters by default.

    Without BatchNorm, whose statistics fail where peers have different classes (Hsieh et al., arXiv 1910.00189).
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 16, 5, stride=2, padding=2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, stride=2, padding=1),
            relu2=nn.ReLU(),
            flat=nn.Flatten(),
            hidden=nn.Linear(32 * 7 * 7, 30),
            relu3=nn.ReLU(),
            head=nn.Linear(30, classes),
        )
    )
