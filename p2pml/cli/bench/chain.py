"""p2pml itself in `bench reduce`: rounds of ChainSGD's reduction and broadcast, run by hosts on nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2pml.cli.bench.harness import ContestantFailed
from p2pml.cli.bench.reducers import Reducer
from p2pml.host import Host
from p2pml.node import Node
from p2pml.protocols.chainsgd.agent import Options
from p2pml.protocols.chainsgd.machine import INLINE, ChainGroup, Contribution

if TYPE_CHECKING:
    from p2pml.cli.bench.reducers import Array


class ChainReducer(Reducer):
    """A group of one model with one tensor. Rank 0 is the mobile agent; a round is a command to each peer's machine.

    Each turn has nodes and a group of its own, so that what they need is counted.
    """

    async def listen(self) -> str:
        return ""

    async def join(self, addresses: Sequence[str]) -> None:
        pass

    async def prepare(self, values: Array) -> str:
        self._turn = contextlib.AsyncExitStack()
        self.resources.push_async_callback(self._turn.aclose)
        self._node = await self._turn.enter_async_context(Node(f"peer-{self.rank}", listen=["tcp://127.0.0.1:0"]))
        machine = ChainGroup(
            {"model": values},
            agent="peer-0" if self.rank else None,
            options=Options(min_peers=self.size),
            addresses=self._node.addresses,
        )
        self._host = await self._turn.enter_async_context(Host(machine, self._node))
        return self._node.addresses[0]

    async def connect(self, addresses: Sequence[str]) -> None:
        if self.rank:
            await self._node.dial(addresses[0])
        await self._host.command("joined")

    async def reduce(self, values: Array) -> Array:
        # A large result is used where it is, in the accumulator; a small one is copied, as the next round can begin sooner then.
        lent = values.nbytes > INLINE
        answer = await self._host.command("average", Contribution(in_place=not lent))
        if not answer.counted or len(answer.members) != self.size:
            raise ContestantFailed(f"an average of {answer.members} on rank {self.rank}: {answer.reason}")
        mean: Array = answer.tensors["model"].numpy() if lent else values
        return mean

    async def release(self) -> None:
        await self._turn.aclose()
