"""DLion's message flow and control (HPDC'21), on a linear model of a few numbers.

Every worker trains at its own pace. After each iteration it sends each other worker the largest entries of its gradient:
as many as the link's measured bandwidth carries during one iteration. Newer gradients take the place of older ones that
still wait. With a staleness bound, a worker that is too far ahead waits; now and then a worker pulls the weights of the one
with the lowest loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from p2pml import statemachine as sm
from p2pml.statemachine import Effect, Received, Send, StateMachine, on
from p2pml.wire.codec import TensorLike, message
from p2pml.wire.options import ChannelOptions
from tests.unit.sketches.linear import Array, gradient_of, largest

ENTRY, HEADER = 8, 64
"""Bytes of an index with its value, and of a message without them."""
LAMBDA, RATE, RECENT = np.float32(0.75), 0.1, 10


@message("sketch/dlion/gradient")
class Gradient:
    iteration: int
    batch: int
    indices: TensorLike
    values: TensorLike


@message("sketch/dlion/loss")
class Loss:
    mean: float


@message("sketch/dlion/pull")
class Pull:
    pass


@message("sketch/dlion/weights")
class Weights:
    weights: TensorLike


class Worker(StateMachine):
    """bound: how many iterations it may be ahead of the slowest (None: any). pull_every: iterations between pulls."""

    name = "sketch/dlion"
    channels = {
        "gradients": ChannelOptions(messages=1),
        "weights": ChannelOptions(messages=1),
        "control": ChannelOptions(priority=0),
    }

    def __init__(
        self,
        x: Array,
        y: Array,
        batch: int,
        iterations: int,
        bound: int | None = None,
        pull_every: int = 10,
        group: int = 1,
    ) -> None:
        self.x, self.y, self.batch, self.iterations = x, y, batch, iterations
        self.bound, self.pull_every, self.group = bound, pull_every, group
        self.weights = np.zeros(x.shape[1], np.float32)  # replaced, never changed: a thread or a link may be reading it
        self.clocks: dict[str, int] = {}
        self.bandwidth: dict[str, float] = {}
        self.others_losses: dict[str, float] = {}
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.iteration = self.lost = self.pulls = self.held_up = 0
        self.began = self.iteration_time = 0.0
        self.sent: list[tuple[str, int, float]] = []  # peer, bytes, budget
        self.computing = self.started = False

    @on(sm.Started)
    def start(self, event: sm.Started) -> Iterator[Effect]:
        yield from self._step()

    @on(sm.PeerJoined)
    def meet(self, event: sm.PeerJoined) -> Iterator[Effect]:
        self.clocks[event.peer] = self.iteration
        yield from self._step()

    @on(sm.PeerLeft)
    def forget(self, event: sm.PeerLeft) -> Iterator[Effect]:
        for table in (self.clocks, self.bandwidth, self.others_losses):
            table.pop(event.peer, None)
        yield from self._step()

    @on(sm.LinkMeasured)
    def measure(self, event: sm.LinkMeasured) -> None:
        if event.bytes_per_second is not None:
            self.bandwidth[event.peer] = event.bytes_per_second

    def _step(self) -> Iterator[Effect]:
        """Start the next iteration, unless one runs, or the group is not there yet, or somebody is too far behind."""
        self.started = self.started or len(self.clocks) + 1 >= self.group
        if self.computing or not self.started:
            return
        if self.bound is not None and self.iteration > min(self.clocks.values(), default=self.iteration) + self.bound:
            self.held_up += 1
            return
        self.computing, self.began = True, self.now
        chosen = [self.random.randrange(len(self.x)) for _ in range(self.batch)]
        yield sm.Compute("step", gradient_of, (self.weights, self.x[chosen], self.y[chosen]), cost=self.batch)

    @on(sm.Computed)
    def share(self, event: sm.Computed) -> Iterator[Effect]:
        gradient, loss = event.result
        self.computing = False
        self.iteration += 1
        elapsed = self.now - self.began
        self.iteration_time += (elapsed - self.iteration_time) * (0.25 if self.iteration > 1 else 1.0)
        self.losses.append(loss)
        self._apply(gradient, 1.0)
        for peer in self.clocks:
            budget = self.bandwidth.get(peer, 0.0) * self.iteration_time
            count = max(1, min(len(gradient), int((budget - HEADER) // ENTRY)))
            message = Gradient(self.iteration, self.batch, *largest(gradient, count))
            self.sent.append((peer, HEADER + ENTRY * count, budget))
            yield Send(peer, message, "gradients", tag=("gradient", self.iteration), supersedes="gradient")
        if self.iteration % self.pull_every == 0:
            yield from self._transfer()
        if self.iteration == self.iterations:
            yield sm.Report("loss", {"mean": self.mean_loss})
            yield sm.Finish(self.weights)
        yield from self._step()

    @property
    def mean_loss(self) -> float:
        return sum(self.losses) / len(self.losses)

    def _apply(self, gradient: Array, weight: float) -> None:
        """Equation of the weighted update: db = LBS_j / LBS_k."""
        self.weights = self.weights - np.float32(RATE * weight / (len(self.clocks) + 1)) * gradient

    @on(sm.SendFailed)
    def count_lost(self, event: sm.SendFailed) -> None:
        self.lost += 1

    @on(Received[Gradient])
    def add(self, event: Received[Gradient]) -> Iterator[Effect]:
        message: Any = event.message
        dense = np.zeros_like(self.weights)
        dense[message.indices.numpy()] = message.values.numpy()
        self._apply(dense, message.batch / self.batch)
        self.clocks[event.peer] = message.iteration
        yield from self._step()

    def _transfer(self) -> Iterator[Effect]:
        """Direct knowledge transfer: tell the loss, and pull from the best."""
        for peer in self.clocks:
            yield Send(peer, Loss(self.mean_loss), "control", supersedes="loss")
        best = min([(self.mean_loss, self.me), *((loss, peer) for peer, loss in self.others_losses.items())])[1]
        if best != self.me:
            yield Send(best, Pull(), "control", supersedes="pull")

    @on(Received[Loss])
    def compare(self, event: Received[Loss]) -> None:
        self.others_losses[event.peer] = event.message.mean

    @on(Received[Pull])
    def give(self, event: Received[Pull]) -> Iterator[Effect]:
        yield Send(event.peer, Weights(self.weights), "weights", supersedes="weights")

    @on(Received[Weights])
    def take(self, event: Received[Weights]) -> None:
        best: Any = event.message.weights
        self.pulls += 1
        self.weights = (1 - LAMBDA) * self.weights + LAMBDA * best.numpy()
