from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.cli.job import JOB, WISH, Dealer, Job, JobRefused, announce_wish, receive_job
from p2pml.cli.options import Part
from p2pml.node import Node


async def until_alone(node: Node) -> None:
    left = asyncio.Event()
    end = node.watch(lambda what, peer, detail: left.set() if what == "left" else None)
    if node.peers:
        await left.wait()
    end()


JOB_OF_3 = Job(task="watch", parts=3, rounds=15, steps_per_round=None)


@asynccontextmanager
async def opened(job: Job = JOB_OF_3, own: int = 0) -> AsyncIterator[tuple[Node, Dealer]]:
    node = Node("opener")
    dealer = Dealer(node, job, own)
    async with node:
        await node.listen("memory://job")
        yield node, dealer


@asynccontextmanager
async def joiner(name: str, wish: Part | None = None) -> AsyncIterator[tuple[Node, Any]]:
    async with Node(name) as node:
        announce_wish(node, wish)
        yield node, await node.dial("memory://job")


async def test_each_joiner_gets_a_part_of_its_own() -> None:
    async with opened() as (_, dealer), joiner("b") as (b, to_b), joiner("c") as (c, to_c):
        assert await receive_job(b, to_b) == (JOB_OF_3, 1)
        assert await receive_job(c, to_c) == (JOB_OF_3, 2)
        assert dealer.dealt == {"opener": 0, "b": 1, "c": 2}


async def test_a_wish_is_granted_and_kept_over_a_cut() -> None:
    async with opened(own=1) as (opener, dealer), joiner("b", (2, 3)) as (b, peer):
        assert await receive_job(b, peer) == (JOB_OF_3, 2)
        await peer.close()
        await until_alone(opener)
        assert dealer.dealt == {"opener": 1}
        async with joiner("c") as (c, to_c):
            assert await receive_job(c, to_c) == (JOB_OF_3, 0)
            assert await receive_job(b, await b.dial("memory://job")) == (JOB_OF_3, 2)


async def test_who_comes_too_many_shares_a_part() -> None:
    async with opened(replace(JOB_OF_3, parts=1)) as _, joiner("b") as (b, to_b):
        assert (await receive_job(b, to_b))[1] == 0


async def test_a_wish_that_does_not_fit_is_refused() -> None:
    async with opened() as _, joiner("b", (1, 4)) as (b, to_b):
        with pytest.raises(JobRefused, match="dealt in 3 parts, not in 4"):
            await receive_job(b, to_b)


@pytest.mark.parametrize("wish", [[5, 3], [-1, 3], [1], ["a", "b"], [True, 3]])
async def test_a_malformed_wish_is_refused(wish: list[Any]) -> None:
    async with opened() as (_, dealer), Node("b") as b:
        b.announce(WISH, wish)
        peer = await b.dial("memory://job")
        with pytest.raises(JobRefused, match="doesn't understand"):
            await receive_job(b, peer)
        assert "b" not in dealer.dealt


async def test_a_node_that_opened_no_group() -> None:
    async with Node("other", listen=["memory://job"]), joiner("b") as (b, peer):
        with pytest.raises(JobRefused, match="other opened no group"):
            await receive_job(b, peer)


async def test_an_opener_that_leaves_before_it_deals() -> None:
    async with joiner_of_silence() as (b, peer):
        waiting = asyncio.create_task(receive_job(b, peer))
        await asyncio.sleep(0)
        peer.link.abort("gone")
        with pytest.raises(JobRefused, match="opener left before it dealt a part"):
            await waiting


@asynccontextmanager
async def joiner_of_silence() -> AsyncIterator[tuple[Node, Any]]:
    async with Node("opener") as silent, Node("b") as b:
        silent.announce(JOB, {**asdict(JOB_OF_3), "dealt": {}, "refused": {}})
        await silent.listen("memory://job")
        yield b, await b.dial("memory://job")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.one_of(values, st.fixed_dictionaries(dict.fromkeys(asdict(JOB_OF_3), values))))
def test_any_announcement_is_read_or_refused(told: Any) -> None:
    try:
        job = Job.read(told)
    except JobRefused:
        return
    assert isinstance(job.task, str)
    assert job.parts >= 1


def test_a_job_survives_the_announcement() -> None:
    assert Job.read({**asdict(JOB_OF_3), "dealt": {}, "something": "newer"}) == JOB_OF_3
