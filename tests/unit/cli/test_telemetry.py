from __future__ import annotations

import asyncio
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.node import Node
from p2pml.resources import Resources, measure
from p2pml.telemetry import Histogram, LoopLag, Telemetry, Traffic, peak_memory


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.floats(0, 1))
def test_a_quantile_is_right_to_five_percent(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    least = sorted(values)[max(0, -(-len(values) * share // 1).__int__() - 1)]
    assert least * 0.999 <= histogram.quantile(share) <= least * 1.051
    assert histogram.count == len(values)
    assert histogram.max == max(values)


def test_an_empty_histogram() -> None:
    assert (Histogram().quantile(0.99), Histogram().max) == (0.0, 0.0)


def test_durations_below_its_resolution() -> None:
    histogram = Histogram()
    histogram.add(0.0)
    histogram.add(1e-9)
    assert histogram.quantile(0.5) <= 1e-9


async def test_a_blocked_loop_is_late_for_every_sample() -> None:
    with LoopLag(0.01) as lag:
        await asyncio.sleep(0.05)
        before = lag.seconds.count
        time.sleep(0.2)  # noqa: ASYNC251 - it is what is measured
        await asyncio.sleep(0)
        await asyncio.sleep(0.02)
    assert lag.seconds.max >= 0.18
    assert lag.seconds.count - before >= 19
    assert lag.seconds.quantile(0.75) > 0.05


async def test_an_idle_loop_is_not_late_for_long() -> None:
    with LoopLag(0.01) as lag:
        await asyncio.sleep(0.2)
    assert lag.seconds.count >= 10
    assert lag.seconds.quantile(0.5) < 0.02


async def test_traffic_of_open_and_closed_links() -> None:
    async with Node("a", listen=["memory://telemetry"]) as first, Node("b") as second:
        inbox = first.open("bulk")
        traffic, other = Traffic(first), Traffic(second)
        peer = await second.dial("memory://telemetry")
        await peer.send("bulk", b"x" * 100_000, timeout=5)
        await inbox.receive(timeout=5)
        assert traffic.received >= 100_000
        assert other.sent >= 100_000
        while_open = traffic.received
        left = asyncio.Event()
        first.watch(lambda what, peer, detail: left.set() if what == "left" else None)
        await peer.close()
        await left.wait()
        assert traffic.received >= while_open
        await second.dial("memory://telemetry")
        again = traffic.received
        assert again >= while_open
        traffic.close()
        other.close()


async def test_a_sample_is_plain_and_complete() -> None:
    async with Node("a") as node:
        with Telemetry(node) as telemetry:
            await asyncio.sleep(0.03)
            sample = telemetry.sample()
    assert sample["bytes_sent"] == sample["bytes_received"] == 0
    assert sample["peak_rss_bytes"] > 1 << 20
    assert 0 <= sample["loop_lag_p50_seconds"] <= sample["loop_lag_p99_seconds"] <= sample["loop_lag_max_seconds"]


def test_peak_memory_grows_with_what_is_used() -> None:
    before = peak_memory()
    block = bytearray(before + (64 << 20))  # more than it ever had at once
    block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    assert peak_memory() >= before + (32 << 20)
    del block
    assert peak_memory() >= before + (32 << 20)


def test_resources_of_this_machine() -> None:
    found = measure()
    assert found.cpus >= 1
    assert 0 < found.memory_free <= found.memory_total
    assert found.battery is None or 0 <= found.battery <= 1
    assert set(asdict(found)) == {"cpus", "load", "memory_total", "memory_free", "battery", "charging"}


@pytest.mark.parametrize(("load", "idle"), [(0.5, 3.5), (9.0, 0.0)])
def test_idle_cpus(load: float, idle: float) -> None:
    assert Resources(cpus=4, load=load, memory_total=2, memory_free=1).idle_cpus == idle
