"""Inboxes: no message is lost and none is received twice, whoever is cancelled or in whatever order they come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pml.errors import LinkClosed
from p2pml.peer import Peer
from p2pml.wire import events
from tests.system.nodes import HERE, Note, pair, turns

KINDS = pytest.mark.parametrize("where", [HERE, "memory://link"])


async def test_a_message_whose_receiver_is_cancelled_in_the_same_turn_goes_to_the_next() -> None:
    """cpython#112202: `Condition.notify` would lose the wake-up."""
    async with pair() as (server, _, peer):
        inbox = server.channel("data")
        for _ in range(20):
            receivers = [asyncio.create_task(inbox.receive(timeout=5)) for _ in range(3)]
            await turns(1)
            put = inbox._put

            def cancel_first(sender: Peer, arrived: events.Arrived, put: Any = put, receivers: Any = receivers) -> None:
                put(sender, arrived)
                receivers[0].cancel()  # woken, and not yet run

            server.sinks["data"] = cancel_first
            await peer.send("data", b"one", timeout=5)
            done, _ = await asyncio.wait(receivers[1:2], timeout=5)
            assert [task.result()[1] for task in done] == [b"one"]
            receivers[2].cancel()
            results = await asyncio.gather(*receivers, return_exceptions=True)
            assert [type(result) for result in results] == [asyncio.CancelledError, tuple, asyncio.CancelledError]
            server.sinks["data"] = put


async def test_several_receivers_are_served_in_order_and_all_woken_by_the_end() -> None:
    async with pair() as (server, _, peer):
        inbox = server.channel("data")
        receivers = [asyncio.create_task(inbox.receive()) for _ in range(5)]
        await turns(1)
        for number in range(3):
            await peer.send("data", Note("", number))
        done = await asyncio.gather(*receivers[:3])
        assert [message.number for _, message in done] == [0, 1, 2]
        followers = [asyncio.create_task(anext(inbox, "the end")) for _ in range(2)]
        await turns(1)
    for receiver in receivers[3:]:
        with pytest.raises(LinkClosed, match="the node is closed"):
            await receiver
    assert await asyncio.gather(*followers) == ["the end", "the end"]


async def test_receives_that_time_out_leave_nothing_behind_and_last_no_longer_than_asked() -> None:
    async with pair() as (server, _, peer):
        inbox = server.channel("data")
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await inbox.receive(timeout=0.001)
        assert not inbox._waiting
        thief = asyncio.create_task(inbox.receive(timeout=0.1))
        start = asyncio.get_running_loop().time()
        while not thief.done():  # what wakes it is taken from under its nose
            await peer.send("data", b"x")
            await turns(3)
            while inbox.receive_nowait() is not None:
                pass
        if not isinstance(thief.exception(), TimeoutError):
            assert thief.result()[1] == b"x"
        assert asyncio.get_running_loop().time() - start < 2


async def test_iterating_ends_with_the_node_and_a_break_loses_nothing() -> None:
    async with pair() as (server, _, peer):
        for number in range(3):
            await peer.send("data", Note("", number), timeout=5)
        async for _, message in server.channel("data"):
            assert message.number == 0
            break
        assert (await server.channel("data").receive(timeout=5))[1].number == 1
