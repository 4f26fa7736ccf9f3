"""hivemind's averager: a group found through a distributed hash table, then a butterfly all-reduce."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from p2pml.cli.bench.harness import CALL_SECONDS, ContestantFailed
from p2pml.cli.bench.reducers import Reducer

if TYPE_CHECKING:
    from p2pml.cli.bench.reducers import Array

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class HivemindReducer(Reducer):
    """`DecentralizedAverager.step`, matchmaking included; a full group starts at once.

    Its memory is measured in this process only, not in those that hivemind starts.
    """

    needs = {"hivemind": "pip install hivemind"}

    async def listen(self) -> str:
        # It hangs or fails under any other start method, and inherits this worker's, which is spawn.
        multiprocessing.set_start_method("fork", force=True)
        self._hivemind: Any = importlib.import_module("hivemind")
        if self.rank:
            return ""
        self._dht = self._open_dht(())
        return str(self._dht.get_visible_maddrs()[0])

    async def join(self, addresses: Sequence[str]) -> None:
        if self.rank:
            self._dht = self._open_dht(addresses[:1])

    def _open_dht(self, initial: Sequence[str]) -> Any:
        dht = self._hivemind.DHT(initial_peers=list(initial), host_maddrs=[LOOPBACK], start=True)
        self.resources.callback(dht.shutdown)
        return dht

    async def prepare(self, values: Array) -> str:
        import torch

        self._averager: Any = self._hivemind.DecentralizedAverager(
            [torch.from_numpy(values.copy())],
            self._dht,
            prefix=f"bench-{len(values)}",
            target_group_size=self.size,
            min_group_size=self.size,
            start=True,
        )
        return ""

    async def reduce(self, values: Array) -> Array:
        if self._averager.step(timeout=CALL_SECONDS / 2) is None:
            raise ContestantFailed(f"hivemind found no group of {self.size} within {CALL_SECONDS / 2:g} s")
        with self._averager.get_tensors() as (tensor,):
            result: Array = tensor.numpy().copy()
        return result

    async def release(self) -> None:
        self._averager.shutdown()
