"""asyncio streams with a length prefix: what most programs write by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pml.cli.bench.ends import LENGTH, End

if TYPE_CHECKING:
    from p2pml.cli.bench.ends import Array


class StreamEnd(End):
    """`write` and `drain`, `readexactly`."""

    async def listen(self) -> str:
        if self.rank:
            return ""
        self._accepted: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda *ends: self._accepted.set_result(ends), "127.0.0.1", 0)
        self.resources.callback(server.close)
        return str(server.sockets[0].getsockname()[1])

    async def join(self, addresses: Sequence[str]) -> None:
        if self.rank:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", int(addresses[0]))
        else:
            self._reader, self._writer = await self._accepted
        self.resources.callback(self._writer.close)

    async def send_message(self, data: bytes) -> None:
        self._writer.write(LENGTH.pack(len(data)) + data)
        await self._writer.drain()

    async def receive_message(self) -> bytes:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    async def send_tensor(self, tensor: Array) -> None:
        self._writer.write(LENGTH.pack(tensor.nbytes))
        self._writer.write(tensor.data.cast("B"))
        await self._writer.drain()

    async def receive_tensor(self) -> Array:
        import numpy as np

        return np.frombuffer(await self.receive_message(), np.float32)
