"""What the tests of nodes share: two messages, two linked nodes, and an eye on what a node tells of its peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from p2pml.errors import P2PMLError
from p2pml.link import Ticket
from p2pml.node import Node
from p2pml.peer import Peer
from p2pml.wire.codec import TensorLike, message

HERE = "tcp://127.0.0.1:0"
SMOOTH = np.repeat(np.arange(500, dtype=np.float32), 500)
"""What compresses well."""


@message("test/note")
class Note:
    text: str
    number: int = 0


@message("test/block")
class Block:
    number: int
    values: TensorLike


class Watch:
    """Waits for what a node tells of its peers."""

    def __init__(self, node: Node) -> None:
        self.seen: list[tuple[str, str, object]] = []
        self._more = asyncio.Event()
        node.watch(self._note)

    def _note(self, what: str, peer: Peer, detail: object) -> None:
        self.seen.append((what, peer.id, detail))
        self._more.set()

    async def until(self, what: str) -> tuple[str, object]:
        async with asyncio.timeout(15):
            while True:
                for kind, peer, detail in self.seen:
                    if kind == what:
                        return peer, detail
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def pair(**options: object) -> AsyncIterator[tuple[Node, Node, Peer]]:
    """Two linked nodes: `server` with a channel 'data' open, `client`, and the server as the client's peer."""
    async with Node("server", listen=[HERE], **options) as server, Node("client") as client:  # type: ignore[arg-type]
        server.open("data")
        watch = Watch(server)
        peer = await client.dial(server.addresses[0])
        await watch.until("joined")
        yield server, client, peer


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


class Fate(Ticket):
    """Writes down what becomes of a message."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def sent(self) -> None:
        self.told.append("sent")

    def delivered(self) -> None:
        self.told.append("delivered")

    def failed(self, error: P2PMLError) -> None:
        self.told.append(error)
