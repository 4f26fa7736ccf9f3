"""Nodes over time: a beginning that fails, an end that leaves nothing behind, and what they tell meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from p2pml.errors import (
    AddressInUse,
    LinkClosed,
    MessageError,
    MessageTooLarge,
    P2PMLError,
    TransportError,
)
from p2pml.node import Node
from p2pml.wire.options import ChannelOptions
from tests.system.nodes import HERE, Note, Watch, pair, turns

KINDS = pytest.mark.parametrize("where", [HERE, "memory://life"])


async def test_a_node_that_cannot_listen_everywhere_listens_nowhere() -> None:
    async with Node("first", listen=[HERE]) as first:
        taken = first.addresses[0]
        second = Node("second", listen=["memory://half-way", HERE, taken])
        with pytest.raises(AddressInUse, match=taken):
            await second.__aenter__()
        for address in second.addresses:
            with pytest.raises(TransportError):
                await first.dial(address)
        with pytest.raises(LinkClosed, match="not running"):
            second.spawn(asyncio.sleep(0))


async def test_a_node_is_entered_once() -> None:
    node = Node("a", listen=["memory://once"])
    async with node:
        pass
    with pytest.raises(RuntimeError, match="entered once"):
        await node.__aenter__()
    with pytest.raises(LinkClosed, match="not running"):
        await node.listen("memory://once")
    with pytest.raises(LinkClosed, match="not running"):
        await node.dial("memory://once")
    async with Node("b", listen=["memory://once"]):
        pass


@pytest.mark.parametrize("name", ["x" * 129, "new\nline"])
def test_a_name_that_others_would_refuse_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at most 128 printable characters"):
        Node(name)


@KINDS
async def test_a_node_that_is_cancelled_while_it_closes_closes_all_the_same(where: str) -> None:
    for count in range(8):
        watched = Node("client")
        async with Node("server", listen=[where]) as server:
            watch = Watch(server)

            async def live(client: Node = watched, server: Node = server) -> None:
                async with client:
                    client.spawn(asyncio.sleep(60))
                    await client.dial(server.addresses[0], keep=True)
                    await asyncio.get_running_loop().create_future()

            living = asyncio.create_task(live())
            await watch.until("joined")
            living.cancel()
            await turns(count)
            living.cancel()
            with pytest.raises(asyncio.CancelledError):
                await living
            await watch.until("left")
            assert not watched._background


@KINDS
async def test_a_connection_accepted_as_the_listener_stops_is_not_left_open(where: str) -> None:
    """distributed PR#9315."""
    for count in range(6):
        server, client = Node("server", listen=[where]), Node("client")
        async with client:
            await server.__aenter__()
            dialing = asyncio.create_task(client.dial(server.addresses[0], timeout=5))
            await turns(count)
            await server.__aexit__(None, None, None)
            await asyncio.wait([dialing])
            if dialing.exception() is None:
                async with asyncio.timeout(5):
                    await dialing.result().link.finished
            else:
                assert isinstance(dialing.exception(), P2PMLError)
            assert not server._links


async def test_tasks_end_with_their_node_and_failures_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with Node("a") as node:
        node.spawn(work())
        await turns(2)
        node.spawn(work())  # and one that does not come to begin
    assert ended.is_set()


@pytest.mark.allow_error_logs
async def test_a_task_that_fails_is_logged_and_the_node_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise LookupError("lost")

    async with Node("a") as node:
        await asyncio.wait([node.spawn(fail())])
        assert "a background task of a node failed" in caplog.text
        await node.listen("memory://goes-on")


@pytest.mark.timeout(20)
async def test_a_peer_that_freezes_right_after_the_handshake_is_noticed_in_time() -> None:
    """websockets#112. The timeout counts from then on, and not from when the handshake would have been overdue."""
    async with Node("server", listen=[HERE]) as server, Node("client", heartbeat=0.1, timeout=0.4) as client:
        joined = Watch(server)
        watch = Watch(client)
        await client.dial(server.addresses[0])
        await joined.until("joined")
        link = server.peers["client"].link
        assert link.transport is not None
        link.transport.pause_reading()  # it hears nothing, and so it answers no ping
        start = asyncio.get_running_loop().time()
        assert await watch.until("left") == ("server", "nothing heard from server for 0.4 s")
        assert asyncio.get_running_loop().time() - start < 3
        link.transport.resume_reading()


async def test_what_cannot_be_announced_is_refused_before_any_link_hears_of_it() -> None:
    async with pair() as (server, client, peer):
        watch = Watch(client)
        with pytest.raises(MessageError, match="what this node announces"):
            server.announce("bad", object())
        with pytest.raises(MessageTooLarge, match="at most 15360"):
            server.announce("big", "x" * 20_000)
        with pytest.raises(MessageTooLarge, match="at most 15360"):
            server.open("x" * 20_000)
        server.announce("good", [1, {"a": None}])
        await watch.until("changed")
        assert peer.meta == {"good": [1, {"a": None}]}
        watch.seen.clear()
        server.announce("good", None)
        await watch.until("changed")
        assert peer.meta == {}
        assert peer.channels == ["data"]


async def test_a_closed_channel_drops_what_it_holds_and_what_comes() -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        inbox = server.open("data", ChannelOptions(messages=2))
        peer = await client.dial(server.addresses[0])
        await peer.send("data", b"one", delivered=True, timeout=5)
        server.close_channel("data")
        assert len(inbox) == 0
        for _ in range(10):
            await peer.send("data", b"more", delivered=True, timeout=5)


async def test_the_bytes_of_a_node_count_closed_links_too() -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        inbox = server.open("data")
        before = 0
        for _ in range(3):
            peer = await client.dial(server.addresses[0])
            await peer.send("data", bytes(100_000), delivered=True, timeout=5)
            assert (await inbox.receive(timeout=5))[0].id == "client"
            assert server.bytes_in >= before + 100_000
            before = server.bytes_in
            await peer.close()
            async with asyncio.timeout(5):
                while server._links or client._links:
                    await turns(1)
        assert server.bytes_in == client.bytes_out
        assert server.bytes_out == client.bytes_in
        assert client.bytes_out > 300_000


async def test_ended_watching_is_told_nothing() -> None:
    async with pair() as (server, client, peer):
        told: list[str] = []
        end = client.watch(lambda what, peer, detail: told.append(what))
        server.announce("x", 1)
        await Watch(client).until("changed")
        end()
        await peer.send("data", Note("x"), delivered=True, timeout=5)
        await peer.close()
        assert told == ["changed"]
