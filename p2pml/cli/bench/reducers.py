"""One peer of a group that averages, and how that is measured: the same for every contestant of `bench reduce`."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from p2pml.cli.bench.harness import ContestantFailed, Member
from p2pml.cli.bench.memory import PeakMemory

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float32]]


class Reducer(Member):
    """What a contestant implements: the mean over all ranks of one float32 vector, known to every rank in the end."""

    _values: Array

    async def prepare(self, values: Array) -> None:
        """Called before vectors of a new size are reduced, outside of any measurement; `values` is this rank's."""

    @abstractmethod
    async def reduce(self, values: Array) -> Array:
        """The mean over all ranks. It may take the place of this rank's `values`."""

    async def fill(self, numel: int) -> None:
        """Make this rank's vector: small whole numbers, so that their mean is exact in any order."""
        import numpy as np

        self._values = np.arange(numel, dtype=np.float32) % 1000 + self.rank
        await self.prepare(self._values)

    async def timed(self, at: float, times: int) -> tuple[float, float]:
        """Reduce `times` times in a row, from the moment `at` on; returns when it began and ended.

        All moments are those of `time.monotonic`, which is the same clock in all processes of a machine.
        """
        _wait_until(at)
        began = time.monotonic()
        result = self._values
        for _ in range(times):
            result = await self.reduce(self._values)
        ended = time.monotonic()
        self._check(result)
        return began, ended

    async def memory(self) -> tuple[int, str]:
        """Bytes that this process needs at the peak of one reduction beyond what it had before, and how that was found."""
        with PeakMemory() as peak:
            result = await self.reduce(self._values)
        self._check(result)
        return peak.extra, peak.method

    async def forget(self) -> None:
        """Free the vector, while others have their turn."""
        del self._values

    def _check(self, result: Array) -> None:
        import numpy as np

        expected = np.arange(len(self._values), dtype=np.float32) % 1000 + (self.size - 1) / 2
        if not np.allclose(result, expected, rtol=1e-5):
            raise ContestantFailed(f"the mean is wrong on rank {self.rank}: {result[:4]}, expected {expected[:4]}")


def _wait_until(at: float) -> None:
    """Sleep. Blocking is meant: nothing else is to happen in this process, and event loops wake up less exactly."""
    late = time.monotonic() - at
    if late > 0:
        raise ContestantFailed(f"the start was {late:.3f} s ago: the machine is too busy to measure anything")
    time.sleep(-late)
