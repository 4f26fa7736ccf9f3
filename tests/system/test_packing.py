"""Compression on its way: in order, taken back, and with links that close in the middle of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pml.errors import LinkClosed, MessageError, MessageTooLarge
from p2pml.node import Node
from p2pml.peer import Peer
from p2pml.wire import compression, events
from p2pml.wire.options import ChannelOptions
from tests.system.nodes import HERE, SMOOTH, Block, Fate, Note, Watch, pair, turns

KINDS = pytest.mark.parametrize("where", [HERE, "memory://link"])


@pytest.fixture
def slow_packing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compressing waits, in its thread, until this is set."""
    free, pack = threading.Event(), compression.wire_message

    def wait(*arguments: Any) -> Any:
        free.wait(10)
        return pack(*arguments)

    monkeypatch.setattr(compression, "wire_message", wait)
    return free


@pytest.mark.parametrize("compress", ["lz4", "zstd", "auto"])
async def test_compressed_and_other_messages_keep_their_order(compress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression.Chooser, "choose", lambda *judged: "lz4")  # as on a slow link
    async with pair() as (server, client, peer):
        client.prefer("data", ChannelOptions(compress=compress))
        noise = np.random.default_rng(1).bytes(200_000)
        sent = [
            Block(0, SMOOTH),
            b"raw",
            Note("plain"),
            Block(1, np.frombuffer(noise, np.uint8)),
            b"",
            Block(2, SMOOTH),
        ]
        fates = [Fate() for _ in sent]
        for message, fate in zip(sent, fates, strict=True):
            peer.link.submit("data", message, fate, tracked=True)
        assert not peer.try_send("data", b"not before these")
        await peer.link.drained()
        got = [(await server.channel("data").receive(timeout=5))[1] for _ in sent]
        assert [getattr(message, "number", message) for message in got] == [0, b"raw", 0, 1, b"", 2]
        assert np.array_equal(got[0].values.numpy(), SMOOTH)
        assert bytes(got[3].values.numpy()) == noise
        assert peer.link.session.bytes_out < SMOOTH.nbytes
        await peer.send("data", b"x", delivered=True, timeout=5)
        assert [fate.told for fate in fates] == [["sent", "delivered"]] * len(sent)


async def test_what_is_being_compressed_can_be_taken_back_and_superseded(slow_packing: threading.Event) -> None:
    async with pair() as (server, client, peer):
        client.prefer("data", ChannelOptions(compress="zstd"))
        first = asyncio.create_task(peer.send("data", Block(1, SMOOTH)))
        second = asyncio.create_task(peer.send("data", Block(2, SMOOTH)))
        await turns(2)
        assert peer.link.waiting("data") == 2
        old, new = Fate(), Fate()
        peer.link.submit("data", Block(3, SMOOTH), old, key="k")
        peer.link.submit("data", Block(4, SMOOTH), new, key="k")
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
        slow_packing.set()
        assert (await server.channel("data").receive(timeout=5))[1].number == 4
        assert "superseded" in str(old.told)
        assert new.told == ["sent"]
        assert peer.link.waiting("data") == 0


@pytest.mark.parametrize("close", [lambda peer: peer.drop("gone"), lambda peer: peer.link.abort("gone")])
async def test_a_link_that_closes_while_it_compresses_fails_each_message_once(
    slow_packing: threading.Event, close: Callable[[Peer], None]
) -> None:
    async with pair() as (_, client, peer):
        client.prefer("data", ChannelOptions(compress="lz4"))
        fates = [Fate() for _ in range(3)]
        for number, fate in enumerate(fates):
            peer.link.submit("data", Block(number, SMOOTH), fate)
        peer.link.submit("data", Block(4, SMOOTH))
        await turns(2)
        close(peer)
        slow_packing.set()
        await asyncio.wait(client._background)
        assert [[str(word) for word in fate.told] for fate in fates] == [["gone"]] * 3


async def test_a_node_that_closes_while_it_compresses_leaves_nobody_waiting(slow_packing: threading.Event) -> None:
    async with pair() as (_, client, peer):
        client.prefer("data", ChannelOptions(compress="lz4"))
        sending = [asyncio.create_task(peer.send("data", Block(number, SMOOTH))) for number in range(3)]
        await turns(2)
        slow_packing.set()
        await client.__aexit__(None, None, None)
        for task in sending:
            with pytest.raises(LinkClosed, match="shuts down"):
                await task
        with pytest.raises(LinkClosed):
            client.spawn(asyncio.sleep(0))


@pytest.mark.allow_error_logs
async def test_a_failure_to_compress_fails_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of threads")

    monkeypatch.setattr(compression, "wire_message", fail)
    async with pair() as (server, client, peer):
        client.prefer("data", ChannelOptions(compress="lz4"))
        with pytest.raises(MessageError, match="could not be compressed"):
            await peer.send("data", Block(1, SMOOTH), timeout=5)
        await peer.send("data", b"next", timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1] == b"next"


async def test_compressed_messages_that_came_before_the_end_are_read_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    free, unpack = threading.Event(), compression.unpack

    def wait(*arguments: Any) -> None:
        free.wait(10)
        unpack(*arguments)

    monkeypatch.setattr(compression, "unpack", wait)
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        inbox = server.open("data")
        watch = Watch(server)
        client.prefer("data", ChannelOptions(compress="zstd"))
        peer = await client.dial(server.addresses[0])
        for number in range(3):
            await peer.send("data", Block(number, SMOOTH), delivered=True, timeout=5)
        await peer.close()
        await watch.until("left")
        assert len(inbox) == 0
        free.set()
        for number in range(3):
            assert (await inbox.receive(timeout=5))[1].number == number
        assert server.budget.used == 0


async def test_a_damaged_compressed_message_is_refused_and_the_next_arrives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (server, client, peer):
        client.prefer("data", ChannelOptions(compress="lz4"))
        pack = compression.compress
        monkeypatch.setattr(compression, "compress", lambda codec, segments: [bytes(len(pack(codec, segments)[0]))])
        await peer.send("data", Block(1, SMOOTH), timeout=5)
        monkeypatch.undo()
        await peer.send("data", Block(2, SMOOTH), timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1].number == 2
        assert "lz4" in caplog.text


async def test_a_node_that_closes_takes_no_more_work(slow_packing: threading.Event) -> None:
    slow_packing.set()
    async with pair() as (server, client, peer):
        client.prefer("data", ChannelOptions(compress="lz4"))
        server._closing = True
        used = server.budget.used
        await peer.send("data", Block(1, SMOOTH), delivered=True, timeout=5)
        assert server.budget.used == used
        assert not server.peers["client"].link._unpacking
        client._closing = True
        with pytest.raises(LinkClosed, match="not running"):
            peer.link.submit("data", Block(1, SMOOTH))
        assert peer.link.waiting("data") == 0
        server._closing = client._closing = False


async def test_a_compressed_message_may_be_too_large_once_unpacked() -> None:
    async with pair(max_message=1 << 19) as (server, client, peer):
        client.prefer("data", ChannelOptions(compress="lz4"))
        with pytest.raises(MessageTooLarge, match="takes at most 524288"):
            await peer.send("data", Block(1, SMOOTH), timeout=5)
        await peer.send("data", b"next", timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1] == b"next"


@pytest.mark.allow_error_logs
async def test_a_handler_that_raises_for_an_unpacked_message_closes_its_link() -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:

        def handle(peer: Peer, arrived: events.Arrived) -> None:
            peer.link.consumed(arrived)
            raise LookupError

        server.open("data", handler=handle)
        client.prefer("data", ChannelOptions(compress="lz4"))
        watch = Watch(client)
        peer = await client.dial(server.addresses[0])
        await peer.send("data", Block(1, SMOOTH), timeout=5)
        assert "it failed here: LookupError" in str((await watch.until("left"))[1])
        assert server.budget.used == 0
