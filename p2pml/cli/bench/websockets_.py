"""The `websockets` library on asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pml.cli.bench.ends import End

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.asyncio.server import ServerConnection

    from p2pml.cli.bench.ends import Array


class WebSocketEnd(End):
    """Binary messages of any size; no compression, no keepalive pings."""

    needs = {"websockets": "pip install 'p2pml[bench]'"}
    _connection: ClientConnection | ServerConnection

    async def listen(self) -> str:
        from websockets.asyncio.server import serve

        if self.rank:
            return ""
        self._accepted: asyncio.Future[ServerConnection] = asyncio.get_running_loop().create_future()

        async def accept(connection: ServerConnection) -> None:
            self._accepted.set_result(connection)
            await connection.wait_closed()

        serving = serve(accept, "127.0.0.1", 0, compression=None, max_size=None, ping_interval=None)
        server = await self.resources.enter_async_context(serving)
        return f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"

    async def join(self, addresses: Sequence[str]) -> None:
        from websockets.asyncio.client import connect

        if self.rank:
            dial = connect(addresses[0], compression=None, max_size=None, ping_interval=None, proxy=None)
            self._connection = await self.resources.enter_async_context(dial)
        else:
            self._connection = await self._accepted

    async def send_message(self, data: bytes) -> None:
        await self._connection.send(data)

    async def receive_message(self) -> bytes:
        return await self._connection.recv(decode=False)

    async def send_tensor(self, tensor: Array) -> None:
        await self._connection.send(tensor.data.cast("B"))

    async def receive_tensor(self) -> Array:
        import numpy as np

        return np.frombuffer(await self._connection.recv(decode=False), np.float32)
