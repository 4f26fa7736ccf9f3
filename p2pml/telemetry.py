"""What a peer measures of its own running: what its links carried, how late its event loop is, how much memory it took.

::

    with Telemetry(node) as telemetry:
        ...
        print(telemetry.sample())  # JSON-able; the progress displays take one every second

It is meant to be always on: a timer every ten milliseconds, and a look at a few counters for a sample.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

LAG_INTERVAL = 0.010
"""Seconds between two looks at the event loop's clock."""

_SMALLEST = 1e-6
_GROWTH = math.log(1.05)


class Histogram:
    """Durations in seconds, in buckets that grow by 5 %: quantiles are right to within that, whatever the number of values."""

    def __init__(self) -> None:
        self.count = 0
        self.max = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        bucket = math.ceil(math.log(seconds / _SMALLEST) / _GROWTH) if seconds > _SMALLEST else 0
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        self.count += 1
        self.max = max(self.max, seconds)

    def quantile(self, share: float) -> float:
        """The least value that `share` (0 to 1) of all values don't exceed; 0 if there are none."""
        wanted = math.ceil(share * self.count)
        for bucket in sorted(self._buckets):
            wanted -= self._buckets[bucket]
            if wanted <= 0:
                return min(self.max, _SMALLEST * math.exp(bucket * _GROWTH))
        return self.max


class LoopLag:
    """How much later than asked for the running event loop calls back, sampled every `interval` seconds; a context manager.

    A loop that is blocked for a second is late for every sample that fell into it, and each of them counts.
    """

    def __init__(self, interval: float = LAG_INTERVAL) -> None:
        self.seconds = Histogram()
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._look)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        self.record(now)
        self._timer = self._loop.call_at(self._due, self._look)

    def record(self, now: float) -> None:
        """The loop called back at `now`: count every sample that was due by then."""
        while True:
            self.seconds.add(max(0.0, now - self._due))
            self._due += self._interval
            if self._due > now:
                return


class _Node(Protocol):
    """What is needed of a `p2pml.node.Node` (which is above this module)."""

    @property
    def peers(self) -> Mapping[str, Any]: ...

    def watch(self, watcher: Callable[[str, Any, Any], None]) -> Callable[[], None]: ...


class Traffic:
    """The bytes that a node's links carried, framing and control included, those of closed links too.

    A link that was given up before its handshake was complete is not counted.
    """

    def __init__(self, node: _Node) -> None:
        self._node = node
        self._closed_sent = self._closed_received = 0
        self.close = node.watch(self._watch)

    @property
    def sent(self) -> int:
        now_open: Iterable[int] = (peer.link.session.bytes_out for peer in self._node.peers.values())
        return self._closed_sent + sum(now_open)

    @property
    def received(self) -> int:
        now_open: Iterable[int] = (peer.link.session.bytes_in for peer in self._node.peers.values())
        return self._closed_received + sum(now_open)

    def _watch(self, what: str, peer: Any, detail: Any) -> None:
        if what == "left":
            self._closed_sent += peer.link.session.bytes_out
            self._closed_received += peer.link.session.bytes_in


class Telemetry:
    """All of it for one node; a context manager on the node's event loop."""

    def __init__(self, node: _Node) -> None:
        self.traffic = Traffic(node)
        self.lag = LoopLag()

    def __enter__(self) -> Self:
        self.lag.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.lag.__exit__(*raised)
        self.traffic.close()

    def sample(self) -> dict[str, float]:
        """The figures since the start, in bytes and seconds."""
        lag = self.lag.seconds
        return {
            "bytes_sent": self.traffic.sent,
            "bytes_received": self.traffic.received,
            "peak_rss_bytes": peak_memory(),
            "loop_lag_p50_seconds": lag.quantile(0.5),
            "loop_lag_p99_seconds": lag.quantile(0.99),
            "loop_lag_max_seconds": lag.max,
        }


def peak_memory() -> int:
    """The most resident memory, in bytes, that this process ever had."""
    if sys.platform == "linux":
        # Not ru_maxrss, which starts with what the parent had when it started this process.
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
