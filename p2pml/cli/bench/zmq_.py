"""ZeroMQ: a pair of sockets over TCP; its own thread does the I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pml.cli.bench.ends import End

if TYPE_CHECKING:
    from p2pml.cli.bench.ends import Array


class ZmqEnd(End):
    """Tensors are sent and received without copies between Python and the library (`copy=False`)."""

    needs = {"zmq": "pip install 'p2pml[bench]'"}

    async def listen(self) -> str:
        import zmq

        context = zmq.Context()
        self.resources.callback(context.destroy, linger=0)
        self._socket = context.socket(zmq.PAIR)
        return "" if self.rank else f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def join(self, addresses: Sequence[str]) -> None:
        if self.rank:
            self._socket.connect(addresses[0])

    async def send_message(self, data: bytes) -> None:
        self._socket.send(data)

    async def receive_message(self) -> bytes:
        return self._socket.recv()

    async def send_tensor(self, tensor: Array) -> None:
        self._socket.send(tensor.data.cast("B"), copy=False)

    async def receive_tensor(self) -> Array:
        import numpy as np

        return np.frombuffer(self._socket.recv(copy=False).buffer, np.float32)
