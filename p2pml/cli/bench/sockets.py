"""Raw blocking sockets: what the kernel and one thread can do, with nothing in between."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pml.cli.bench.ends import LENGTH, End

if TYPE_CHECKING:
    from p2pml.cli.bench.ends import Array


class SocketEnd(End):
    """`sendall` of a length prefix and the bytes; tensors arrive by `recv_into` in memory that was there before."""

    async def listen(self) -> str:
        if self.rank:
            return ""
        self._listening = self.resources.enter_context(socket.create_server(("127.0.0.1", 0)))
        return str(self._listening.getsockname()[1])

    async def join(self, addresses: Sequence[str]) -> None:
        if self.rank:
            connected = socket.create_connection(("127.0.0.1", int(addresses[0])))
        else:
            connected, _ = self._listening.accept()
        self._socket = self.resources.enter_context(connected)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()

    async def send_message(self, data: bytes) -> None:
        self._socket.sendall(LENGTH.pack(len(data)) + data)

    async def receive_message(self) -> bytes:
        return self._take(self._take_length())

    async def send_tensor(self, tensor: Array) -> None:
        self._socket.sendall(LENGTH.pack(tensor.nbytes))
        self._socket.sendall(tensor.data.cast("B"))

    async def receive_tensor(self) -> Array:
        length = self._take_length()
        memory = self.target.data.cast("B")[:length]
        at = min(len(self._received), length)
        memory[:at] = self._take(at)
        while at < length:
            count = self._socket.recv_into(memory[at:])
            if not count:
                raise EOFError("the other end is gone")
            at += count
        return self.target

    def _take_length(self) -> int:
        length: int = LENGTH.unpack(self._take(LENGTH.size))[0]
        return length

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            more = self._socket.recv(1 << 16)  # small messages that came together take one call
            if not more:
                raise EOFError("the other end is gone")
            self._received += more
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken
