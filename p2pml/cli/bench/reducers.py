"""One peer of a group that averages, and how that is measured: the same for every contestant of `bench reduce`.

A turn is `fill`, `meet`, `timed`, `verify`, `forget`. Between turns a contestant holds no vector, while others have theirs.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from p2pml.cli.bench.harness import ContestantFailed, Member
from p2pml.cli.bench.memory import PeakMemory

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float32]]

PERIOD = 1000
"""The vectors are 0, 1, ..., `PERIOD` - 1 over and over, plus the rank: their mean is exact in any order."""


class Reducer(Member):
    """What a contestant implements: the mean over all ranks of one float32 vector, known to every rank in the end."""

    _values: Array
    _result: Array
    _peak: PeakMemory

    async def prepare(self, values: Array) -> str:
        """Get ready for vectors like `values`; returns an address for the others, if there is a new one."""
        return ""

    async def connect(self, addresses: Sequence[str]) -> None:
        """What is to be done when all ranks are prepared. It may overwrite the values that `prepare` was given."""

    @abstractmethod
    async def reduce(self, values: Array) -> Array:
        """The mean over all ranks. It may take the place of this rank's `values`."""

    async def release(self) -> None:
        """Let go of all that `prepare` and `connect` made."""

    async def fill(self, numel: int) -> str:
        """Make this rank's vector, and get ready. What memory is taken from here on is counted."""
        import numpy as np

        self._values = np.empty(numel, np.float32)
        _write(self._values, self.rank)
        self._peak = PeakMemory()
        return await self.prepare(self._values)

    async def meet(self, addresses: Sequence[str]) -> None:
        """Make the group."""
        await self.connect(addresses)
        _write(self._values, self.rank)

    async def timed(self, at: float, times: int) -> tuple[float, float, int, str]:
        """Reduce `times` times in a row, from the moment `at` on. Returns when it began and ended, the bytes that this
        process had at its peak since `fill` beyond what it had then, and how that was found.

        All moments are those of `time.monotonic`, which is the same clock in all processes of a machine.
        """
        _wait_until(at)
        began = time.monotonic()
        result = self._values
        for _ in range(times):
            result = await self.reduce(self._values)
        ended = time.monotonic()
        self._peak.stop()
        self._result = result
        return began, ended, self._peak.extra, self._peak.method

    async def verify(self) -> None:
        """Check the result. Not before all ranks have theirs: whoever blocks its process for that keeps the others waiting."""
        self._check(self._result)
        del self._result

    async def forget(self) -> None:
        """End the turn."""
        await self.release()
        del self._values

    def _check(self, result: Array) -> None:
        import numpy as np

        expected = np.empty_like(self._values)
        _write(expected, (self.size - 1) / 2)
        if not np.allclose(result, expected, rtol=1e-5):
            raise ContestantFailed(f"the mean is wrong on rank {self.rank}: {result[:4]}, expected {expected[:4]}")


def _write(values: Array, more: float) -> None:
    """Write a vector without any other memory of its size."""
    import numpy as np

    pattern = np.arange(PERIOD, dtype=np.float32) + np.float32(more)
    whole = len(values) // PERIOD * PERIOD
    values[:whole].reshape(-1, PERIOD)[:] = pattern
    values[whole:] = pattern[: len(values) - whole]


def _wait_until(at: float) -> None:
    """Sleep. Blocking is meant: nothing else is to happen in this process, and event loops wake up less exactly."""
    late = time.monotonic() - at
    if late > 0:
        raise ContestantFailed(f"the start was {late:.3f} s ago: the machine is too busy to measure anything")
    time.sleep(-late)
