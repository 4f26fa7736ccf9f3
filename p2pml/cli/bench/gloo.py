"""torch.distributed with gloo: a collective in C++, for a fixed set of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from p2pml.cli.bench.harness import CALL_SECONDS
from p2pml.cli.bench.reducers import Reducer

if TYPE_CHECKING:
    from p2pml.cli.bench.reducers import Array


class GlooReducer(Reducer):
    """`all_reduce` of the sum in place, then a division by the number of ranks; one thread for each rank's arithmetic."""

    needs = {"torch": "pip install 'p2pml[torch]'"}

    async def listen(self) -> str:
        import torch
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is public, but not declared so

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        if self.rank:
            return ""
        self._store = TCPStore("127.0.0.1", 0, self.size, is_master=True, wait_for_workers=False)
        return str(self._store.port)

    async def join(self, addresses: Sequence[str]) -> None:
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # it is public, but not declared so

        if self.rank:
            self._store = TCPStore("127.0.0.1", int(addresses[0]), self.size, is_master=False)
        limit = timedelta(seconds=CALL_SECONDS)
        distributed.init_process_group("gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=limit)
        self.resources.callback(distributed.destroy_process_group)

    async def reduce(self, values: Array) -> Array:
        import torch
        from torch import distributed

        tensor = torch.from_numpy(values)
        distributed.all_reduce(tensor)
        tensor /= self.size
        return values
