"""p2pml itself in `bench link`: the whole path of a message through codec, session, credits and node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pml.cli.bench.ends import End
from p2pml.node import Node
from p2pml.peer import Inbox, Peer
from p2pml.wire.codec import Head, Tensor, TensorLike, message
from p2pml.wire.options import ChannelOptions

if TYPE_CHECKING:
    from p2pml.cli.bench.ends import Array

PLACES = 2
"""Memories that tensors are received into by turns: one is being looked at while the next tensor arrives."""


@message("bench/bulk")
class Bulk:
    """A large tensor."""

    values: TensorLike


@message("bench/note")
class Note:
    """A small typed message."""

    round: int
    weight: float
    text: bytes


class NodeEnd(End):
    """Two nodes on a TCP link.

    Tensors: 'tensor' arrives in memory that was there before (`Node.open(place=...)`), as with raw sockets; 'fresh' in memory
    of its own. Messages: 'message' is bytes; 'typed' is an object with these bytes and two numbers as its fields.
    """

    bulk = ("tensor", "fresh")
    small = ("message", "typed")
    _peer: Peer

    async def listen(self) -> str:
        node = Node(f"bench-{self.rank}", listen=[] if self.rank else ["tcp://127.0.0.1:0"])
        self._node = await self.resources.enter_async_context(node)
        self._messages = node.open("message")
        self._typed = node.open("typed")
        self._fresh = node.open("fresh")
        # As many messages may be under way or unread as there are places: none is written to while it is being read.
        self._tensors = node.open("tensor", ChannelOptions(messages=PLACES), place=self._place)
        self._places: list[memoryview] = []
        return "" if self.rank else node.addresses[0]

    async def join(self, addresses: Sequence[str]) -> None:
        if self.rank:
            self._peer = await self._node.dial(addresses[0])
            await self.send_message(b"here I am")
        else:
            self._peer, _ = await self._messages.receive()

    def _place(self, peer: str, head: Head) -> list[memoryview]:
        import numpy as np

        if not self._places or len(self._places[0]) != self.target.nbytes:
            self._places = [np.full_like(self.target, -1.0).view(np.uint8).data for _ in range(PLACES)]
        self._places.append(self._places.pop(0))
        return self._places[-1:]

    async def send_message(self, data: bytes) -> None:
        await self._peer.send("message", data)

    async def receive_message(self) -> bytes:
        data: bytes = (await self._messages.receive())[1]
        return data

    async def send_typed(self, data: bytes) -> None:
        await self._peer.send("typed", Note(1, 0.5, data))

    async def receive_typed(self) -> bytes:
        note: Note = (await self._typed.receive())[1]
        return note.text

    async def send_tensor(self, tensor: Array) -> None:
        await self._peer.send("tensor", Bulk(tensor))

    async def receive_tensor(self) -> Array:
        return await _receive(self._tensors)

    async def send_fresh(self, tensor: Array) -> None:
        await self._peer.send("fresh", Bulk(tensor))

    async def receive_fresh(self) -> Array:
        return await _receive(self._fresh)


async def _receive(inbox: Inbox) -> Array:
    bulk: Bulk = (await inbox.receive())[1]
    assert isinstance(bulk.values, Tensor)
    values: Array = bulk.values.numpy()
    return values
