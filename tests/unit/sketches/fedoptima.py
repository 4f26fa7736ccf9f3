"""FedOptima's message flow and control (arXiv 2504.13850, algorithms 1 to 4), on a linear model of a few numbers.

A device streams activations while it has credit, and after `local_steps` sends its front and waits for the global one.
The server computes one thing at a time: a device's model first, then activations of the device that was served least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from p2pml import statemachine as sm
from p2pml.statemachine import Effect, Received, Send, StateMachine, on
from p2pml.wire.codec import TensorLike, Tensors, message
from p2pml.wire.options import ChannelOptions
from tests.unit.sketches.linear import Array, Model, arrays, local_step, merge, server_step

CHANNELS = {
    "activations": ChannelOptions(manual=True),
    "models": ChannelOptions(messages=1),
    "control": ChannelOptions(priority=0),
}


@message("sketch/fedoptima/activations")
class Activations:
    x: TensorLike
    y: TensorLike


@message("sketch/fedoptima/device-model")
class DeviceModel:
    base: int  # t_k: the version of the global model that it was trained from
    tensors: Tensors


@message("sketch/fedoptima/global-model")
class GlobalModel:
    version: int
    tensors: Tensors


@message("sketch/fedoptima/stop")
class Stop:
    pass


class Device(StateMachine):
    """Algorithm 1."""

    name = "sketch/fedoptima"
    channels = CHANNELS

    def __init__(self, x: Array, y: Array, local_steps: int, batch: int = 4) -> None:
        self.info = {"role": "device"}
        self.x, self.y, self.local_steps, self.batch = x, y, local_steps, batch
        self.model: Model = {}
        self.base = self.steps = self.models_sent = self.replies = self.streamed = 0
        self.active, self.server = False, ""  # active: the paper's sender status

    @on(sm.PeerJoined)
    def meet(self, event: sm.PeerJoined) -> None:
        if event.info["role"] == "server":
            self.server = event.peer

    @on(sm.CreditGranted)
    def turn_on(self, event: sm.CreditGranted) -> None:
        if event.channel == "activations":
            self.active = True

    @on(Received[GlobalModel])
    def replace(self, event: Received[GlobalModel]) -> Iterator[Effect]:
        self.model, self.base = arrays(event.message.tensors), event.message.version
        self.replies += 1
        yield self._step()

    def _step(self) -> sm.Compute:
        chosen = [self.random.randrange(len(self.x)) for _ in range(self.batch)]
        return sm.Compute("step", local_step, (self.model, self.x[chosen], self.y[chosen]), cost=self.batch)

    @on(sm.Computed)
    def go_on(self, event: sm.Computed) -> Iterator[Effect]:
        _, x, y = event.result
        self.steps += 1
        if self.active:
            self.active = False
            self.streamed += 1
            yield Send(self.server, Activations(x, y), "activations", or_drop=True)
        if self.steps % self.local_steps:
            yield self._step()
        else:  # the model rests until the answer, which proves that it arrived: it need not be copied
            self.models_sent += 1
            yield Send(self.server, DeviceModel(self.base, self.model), "models")

    @on(Received[Stop], sm.PeerLeft)
    def stop(self, event: Received[Stop] | sm.PeerLeft) -> Iterator[Effect]:
        if event.peer == self.server:
            yield sm.Finish(self.steps)


@dataclass
class Seat:
    """What the server keeps for a device: queue Q^act_k, counter c_k, and whether it holds a credit."""

    count: int
    queue: deque[Activations]
    granted: bool = False


class Server(StateMachine):
    """Algorithms 2 to 4. `omega` bounds queued activations and credits together, `stop_at` is the last version t."""

    name = "sketch/fedoptima"
    channels = CHANNELS

    def __init__(self, model: Model, back: Array, omega: int, stop_at: int, max_staleness: int = 1000) -> None:
        self.info = {"role": "server"}
        self.model, self.back, self.busy = model, back, False
        self.omega, self.stop_at, self.max_staleness = omega, stop_at, max_staleness
        self.version = self.peak = 0
        self.stale: list[str] = []
        self.losses: list[float] = []
        self.seats: dict[str, Seat] = {}
        self.models: deque[tuple[str, DeviceModel]] = deque()

    @on(sm.PeerJoined)
    def seat(self, event: sm.PeerJoined) -> Iterator[Effect]:
        if event.info["role"] == "device":
            least = min((seat.count for seat in self.seats.values()), default=0)
            self.seats[event.peer] = Seat(least, deque())
            yield Send(event.peer, GlobalModel(self.version, self.model), "models")
            yield from self._grant()

    @on(sm.PeerLeft)
    def purge(self, event: sm.PeerLeft) -> Iterator[Effect]:
        self.seats.pop(event.peer, None)
        self.models = deque(item for item in self.models if item[0] != event.peer)
        yield from self._grant()

    @on(Received[DeviceModel])
    def put_model(self, event: Received[DeviceModel]) -> Iterator[Effect]:
        self.models.append((event.peer, event.message))
        yield from self._get()

    @on(Received[Activations])
    def put_activations(self, event: Received[Activations]) -> Iterator[Effect]:
        seat = self.seats[event.peer]
        seat.granted = False
        seat.queue.append(event.message)
        yield from self._get()

    def _get(self) -> Iterator[Effect]:
        """Start the next computation, if none runs (algorithm 3)."""
        while self.models and not self.busy:
            peer, message = self.models.popleft()
            age = self.version - message.base
            if age > self.max_staleness:
                self.stale.append(peer)
                yield Send(peer, GlobalModel(self.version, self.model), "models")
            else:
                self.busy = True
                yield sm.Compute(("merge", peer), merge, (self.model, arrays(message.tensors), 1 / (age + 1)))
        waiting = [seat for seat in self.seats.values() if seat.queue]
        if waiting and not self.busy:
            seat = min(waiting, key=lambda seat: seat.count)
            seat.count += 1
            batch: Any = seat.queue.popleft()
            self.busy = True
            yield sm.Compute(
                ("train", ""), server_step, (self.back, batch.x.numpy(), batch.y.numpy()), cost=batch.y.shape[0]
            )
        yield from self._grant()

    def _grant(self) -> Iterator[Effect]:
        """Credit for those without, the least served first, as far as `omega` goes (section IV-C)."""
        taken = sum(len(seat.queue) + seat.granted for seat in self.seats.values())
        self.peak = max(self.peak, taken)
        without = [(seat.count + len(seat.queue), peer) for peer, seat in self.seats.items() if not seat.granted]
        for _, peer in sorted(without)[: max(0, self.omega - taken)]:
            self.seats[peer].granted = True
            yield sm.Grant(peer, "activations")

    @on(sm.Computed)
    def computed(self, event: sm.Computed) -> Iterator[Effect]:
        self.busy = False
        what, peer = event.tag
        if what == "train":
            self.losses.append(event.result)
        else:
            self.model, self.version = event.result, self.version + 1
            yield sm.Report("version", {"t": self.version, "device": peer})
            yield Send(peer, GlobalModel(self.version, self.model), "models")
        if self.version == self.stop_at:
            for peer in self.seats:
                yield Send(peer, Stop(), "control")
            yield sm.Finish(self.version)
        else:
            yield from self._get()
