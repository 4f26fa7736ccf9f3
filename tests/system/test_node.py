"""Nodes over real sockets: what an embedding program relies on, and what must not bring a node down."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from p2pml.address import Address
from p2pml.errors import (
    AddressError,
    AddressInUse,
    HandshakeRefused,
    LinkClosed,
    MessageError,
    MessageRefused,
    MessageTooLarge,
    SendTimeout,
    TransportError,
    UnknownChannel,
)
from p2pml.node import Node
from p2pml.wire import codec
from p2pml.wire.framing import HEADER, MAGIC, FrameType, frame, preface
from p2pml.wire.options import ChannelOptions
from tests.system.nodes import HERE, Block, Note, Watch, pair


async def connect_raw(server: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = Address.parse(server.addresses[0])
    return await asyncio.open_connection(address.host, address.port)


async def still_serves(server: Node) -> None:
    """A newcomer can send to this node."""
    async with Node("newcomer") as node:
        peer = await node.dial(server.addresses[0])
        await peer.send("data", b"are you there?", timeout=5)
        _, answer = await server.channel("data").receive(timeout=5)
        assert answer == b"are you there?"


async def test_messages_of_all_kinds_arrive_in_order() -> None:
    async with pair() as (server, _, peer):
        big = np.arange(1_000_000, dtype=np.float64)
        sent = [b"", b"raw", Note("hello"), Block(1, big), b"x" * 300_000, Block(2, np.zeros((0, 3))), Note("end", 7)]
        for item in sent:
            await peer.send("data", item, timeout=5)
        arrived = [(await server.channel("data").receive(timeout=5))[1] for _ in sent]
        assert arrived[:3] == [b"", b"raw", Note("hello")]
        assert np.array_equal(arrived[3].values.numpy(), big)
        assert bytes(arrived[4]) == b"x" * 300_000
        assert arrived[5].values.shape == (0, 3)
        assert arrived[6] == Note("end", 7)


async def test_both_sides_send_more_than_the_window_at_once() -> None:
    """fedimint#9091: sending and receiving must not wait for each other."""
    async with Node("a", listen=[HERE]) as a, Node("b") as b:
        inboxes = [node.open("data", ChannelOptions(messages=4, bytes=1 << 16)) for node in (a, b)]
        await b.dial(a.addresses[0])
        watch = Watch(a)
        if "b" not in a.peers:
            await watch.until("joined")

        async def exchange(node: Node, other: str) -> None:
            for number in range(50):
                await node.peers[other].send("data", Block(number, np.full(20_000, number, np.float32)))

        async def drain(index: int) -> list[int]:
            return [(await inboxes[index].receive())[1].number for _ in range(50)]

        results = await asyncio.gather(exchange(a, "b"), exchange(b, "a"), drain(0), drain(1))
        assert results[2] == results[3] == list(range(50))


async def test_a_slow_reader_slows_its_sender_and_nothing_grows() -> None:
    """nats.go#1163."""
    async with Node("server", listen=[HERE], memory=8 << 20) as server, Node("client") as client:
        inbox = server.open("data", ChannelOptions(messages=8, bytes=1 << 16))
        peer = await client.dial(server.addresses[0])
        block = np.zeros(250_000, np.float32)

        async def send() -> None:
            for number in range(40):
                await peer.send("data", Block(number, block))

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for number in range(40):
                _, got = await inbox.receive(timeout=10)
                assert got.number == number
        assert server.budget.peak <= 8 << 20


async def test_a_send_without_credit_waits_and_says_why_it_gave_up() -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        server.open("data", ChannelOptions(messages=1))
        server.open("manual", ChannelOptions(manual=True))
        peer = await client.dial(server.addresses[0])
        await peer.send("data", b"one", timeout=5)
        assert not peer.try_send("data", b"two")
        with pytest.raises(SendTimeout, match="granted no credit on 'data'"):
            await peer.send("data", b"two", timeout=0.05)
        with pytest.raises(SendTimeout, match=r"has not opened a channel 'dada' .*\(it has: data, manual\)"):
            await peer.send("dada", b"two", timeout=0.05)
        with pytest.raises(SendTimeout, match="manual"):
            await peer.send("manual", b"two", timeout=0.05)
        assert (await server.channel("data").receive(timeout=5))[1] == b"one"
        await peer.send("data", b"three", timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1] == b"three"


async def test_a_send_before_the_peer_opens_the_channel_waits_for_it() -> None:
    """pccl#13: using a link right after connecting is safe."""
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        peer = await client.dial(server.addresses[0])
        sending = asyncio.create_task(peer.send("late", Block(1, np.ones(100_000))))
        await asyncio.wait([sending], timeout=0.05)
        assert not sending.done()
        inbox = server.open("late")
        _, got = await inbox.receive(timeout=5)
        assert got.number == 1
        await sending


async def test_a_cancelled_send_gives_its_credit_back() -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        inbox = server.open("data", ChannelOptions(messages=2))
        peer = await client.dial(server.addresses[0])
        for _ in range(5):
            await peer.send("data", b"a", timeout=5)
            await peer.send("data", b"b", timeout=5)
            waiting = asyncio.create_task(peer.send("data", Block(0, np.ones(100_000))))
            await asyncio.wait([waiting], timeout=0.02)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert [(await inbox.receive(timeout=5))[1] for _ in "ab"] == [b"a", b"b"]
        assert len(inbox) == 0


async def test_a_cancelled_receive_loses_nothing() -> None:
    """distributed#6548."""
    async with pair() as (server, _, peer):
        inbox = server.channel("data")
        for number in range(20):
            receiving = asyncio.create_task(inbox.receive())
            await asyncio.wait([receiving], timeout=0)
            await peer.send("data", b"%d" % number)
            receiving.cancel()
            results = await asyncio.gather(receiving, return_exceptions=True)
            taken = results[0]
            if isinstance(taken, asyncio.CancelledError):
                taken = await inbox.receive(timeout=5)
            assert taken[1] == b"%d" % number  # type: ignore[index]


async def test_delivered_means_that_the_peer_has_it() -> None:
    async with pair() as (server, _, peer):
        await peer.send("data", Block(5, np.ones(1000)), delivered=True, timeout=5)
        assert len(server.channel("data")) == 1


@pytest.mark.parametrize("compress", ["lz4", "zstd"])
async def test_compressed_messages_arrive_whole_and_in_order(compress: str) -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        inbox = server.open("data")
        client.prefer("data", ChannelOptions(compress=compress))
        peer = await client.dial(server.addresses[0])
        smooth = np.repeat(np.arange(1000, dtype=np.float32), 500)

        async def send() -> None:
            for number in range(6):
                await peer.send("data", Block(number, smooth + number))
                await peer.send("data", Note("between", number))

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for number in range(6):
                assert np.array_equal((await inbox.receive(timeout=10))[1].values.numpy(), smooth + number)
                assert (await inbox.receive(timeout=10))[1] == Note("between", number)
        assert peer.link.session.bytes_out < smooth.nbytes * 3


async def test_a_message_that_the_peer_does_not_know_is_refused_and_the_link_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (server, _, peer):
        head = codec.encode(Block(1, np.ones(50_000))).head.replace(b"test/block", b"test/wrong")
        encoded = codec.Encoded(head, codec.encode(Block(1, np.ones(50_000))).segments, [])
        with pytest.raises(MessageRefused, match="unknown kind 'test/wrong'"):
            await peer.send("data", encoded, timeout=5)
        await peer.send("data", b"next", timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1] == b"next"


async def test_a_message_beyond_the_peers_limit_is_refused_here() -> None:
    """rocicorp/mono PR#5982: refuse locally, the link goes on."""
    async with pair(max_message=1 << 20) as (server, _, peer):
        with pytest.raises(MessageTooLarge, match="takes at most 1048576"):
            await peer.send("data", Block(1, np.zeros(1 << 20)))
        await peer.send("data", b"next", timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1] == b"next"


async def test_a_message_beyond_the_peers_memory_is_refused_there() -> None:
    async with pair(memory=4 << 20) as (server, _, peer):
        with pytest.raises(MessageRefused, match="receive memory of 4194304"):
            await peer.send("data", Block(1, np.zeros(1 << 20)), timeout=5)
        await peer.send("data", b"next", timeout=5)
        assert (await server.channel("data").receive(timeout=5))[1] == b"next"


async def test_what_is_no_message_is_an_error_at_once() -> None:
    async with pair() as (_, _, peer):
        with pytest.raises(MessageError, match="no message"):
            await peer.send("data", object())
        with pytest.raises(MessageError, match=r"test/note.number: expected int"):
            await peer.send("data", Note("x", "7"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(4096),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        preface((7, 9)),
        preface() + os.urandom(500),
        preface() + HEADER.pack(FrameType.DATA, 3, 0, 1, 100, 0) + bytes(100),
        preface() + HEADER.pack(FrameType.HELLO, 0, 65535, 0, 1 << 31, 0),
        preface() + frame(FrameType.HELLO, head=b"\x9b" + b"\xff" * 8),
        preface() + frame(FrameType.HELLO, head=b"\x81" * 10_000),
        preface() + frame(FrameType.HELLO, head=codec.plain_dumps({"peer": 5})),
        MAGIC,
    ],
    ids=[
        "http",
        "random",
        "tls",
        "version",
        "random frames",
        "early data",
        "lengths",
        "array bomb",
        "nesting bomb",
        "bad hello",
        "cut",
    ],
)
async def test_garbage_is_dropped_and_the_node_serves_on(garbage: bytes) -> None:
    async with Node("server", listen=[HERE]) as server:
        server.open("data")
        reader, writer = await connect_raw(server)
        writer.write(garbage)
        if garbage == MAGIC:
            writer.write_eof()
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
        writer.close()
        await still_serves(server)
        assert server.budget.used <= 1 << 20


async def test_a_silent_connection_is_closed() -> None:
    async with Node("server", listen=[HERE], handshake=0.2) as server:
        server.open("data")
        reader, writer = await connect_raw(server)
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
        writer.close()
        await still_serves(server)


async def test_silent_connections_are_limited_in_number() -> None:
    async with Node("server", listen=[HERE]) as server:
        server.open("data")
        connections = [await connect_raw(server) for _ in range(100)]
        dropped = 0
        for reader, _ in connections[64:]:
            async with asyncio.timeout(5):
                dropped += await reader.read(1 << 16) == b""
        assert dropped == 36
        for _, writer in connections:
            writer.close()
        served = False
        while not served:  # the server has yet to notice that they are gone
            with suppress(LinkClosed):
                await still_serves(server)
                served = True


async def test_a_peer_id_in_use_is_refused() -> None:
    async with pair() as (server, _, _), Node("client") as other, Node("server") as namesake:
        with pytest.raises(HandshakeRefused, match="peer id 'client' is in use"):
            await other.dial(server.addresses[0])
        with pytest.raises(HandshakeRefused, match="peer id 'server' is in use"):
            await namesake.dial(server.addresses[0])
        await still_serves(server)


async def test_a_node_does_not_talk_to_itself() -> None:
    async with Node("server", listen=[HERE]) as server:
        with pytest.raises(HandshakeRefused, match="dialed itself"):
            await server.dial(server.addresses[0])


async def test_dialing_twice_gives_the_same_peer() -> None:
    async with pair() as (server, client, peer):
        assert await client.dial(server.addresses[0]) is peer
        assert len(server.peers) == 1


async def test_two_nodes_that_dial_each_other_end_with_one_link() -> None:
    """rust-libp2p#752, hivemind#624: 20 of 20 times."""
    for _ in range(20):
        async with Node("a", listen=[HERE]) as a, Node("b", listen=[HERE]) as b:
            a.open("data")
            b.open("data")
            first, second = await asyncio.gather(a.dial(b.addresses[0]), b.dial(a.addresses[0]))
            assert (first.id, second.id) == ("b", "a")
            await asyncio.gather(first.send("data", b"to b", timeout=5), second.send("data", b"to a", timeout=5))
            assert (await a.channel("data").receive(timeout=5))[1] == b"to a"
            assert (await b.channel("data").receive(timeout=5))[1] == b"to b"


async def test_errors_of_dialing_name_the_address_and_the_cause() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    async with Node("client") as client:
        with pytest.raises(TransportError, match=f"tcp://127.0.0.1:{port}.*refused"):
            await client.dial(f"tcp://127.0.0.1:{port}")
        with pytest.raises(AddressError, match=r"10.0.0.2:7700.*tcp://10.0.0.2:7700"):
            await client.dial("10.0.0.2:7700")
        with pytest.raises(AddressError, match="no transport for 'pigeon://'"):
            await client.dial("pigeon://coop")


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async with Node("server", listen=[HERE]) as server:
        with pytest.raises(AddressInUse, match=server.addresses[0]):
            async with Node("other", listen=[server.addresses[0]]):
                pass


async def test_a_node_rebinds_its_port_at_once() -> None:
    """torchft#30."""
    async with pair() as (server, _, _):
        address = server.addresses[0]
    async with Node("again", listen=[address]) as again:
        assert again.addresses == [address]


async def test_an_unknown_channel_is_an_error_here() -> None:
    async with Node("a") as node:
        node.open("data")
        with pytest.raises(UnknownChannel, match=r"no channel 'dada' .*open: data"):
            node.channel("dada")
        with pytest.raises(ValueError, match="open already"):
            node.open("data")


async def test_closing_a_node_wakes_who_waits() -> None:
    async with Node("server", listen=[HERE]) as server:
        inbox = server.open("data", ChannelOptions(messages=1))
        async with Node("client") as client:
            watch = Watch(server)
            peer = await client.dial(server.addresses[0])
            await peer.send("data", b"one", timeout=5)
            sending = asyncio.create_task(peer.send("data", b"two"))
            await asyncio.wait([sending], timeout=0.02)
        with pytest.raises(LinkClosed):
            await sending
        _, reason = await watch.until("left")
        assert "the node shuts down" in str(reason)
        receiving = asyncio.create_task(server.open("other").receive())
        await asyncio.wait([receiving], timeout=0)
        assert (await inbox.receive(timeout=5))[1] == b"one"
    with pytest.raises(LinkClosed):
        await receiving


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Node("a", listen=[HERE]):
            raise ZeroDivisionError


async def test_a_kept_link_is_dialed_again() -> None:
    async with Node("client") as client:
        client.open("data")
        watch = Watch(client)
        async with Node("server", listen=[HERE]) as server:
            address = server.addresses[0]
            await client.dial(address, keep=True)
        await watch.until("left")
        watch.seen.clear()
        async with Node("server", listen=[address]):
            assert await watch.until("joined") == ("server", None)
            await client.peers["server"].close()


CHILD = textwrap.dedent("""
    import asyncio, sys
    from p2pml import Node
    async def main():
        async with Node("child", listen=["tcp://127.0.0.1:0"], heartbeat=0.1, timeout=0.5) as node:
            inbox = node.open("data")
            print(node.addresses[0], flush=True)
            async for peer, message in inbox:
                await peer.send("data", b"echo")
    asyncio.run(main())
""")


@asynccontextmanager
async def child() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_killed_peer_is_told_at_once() -> None:
    async with child() as (process, address), Node("parent", heartbeat=5, timeout=20) as node:
        inbox = node.open("data")
        watch = Watch(node)
        peer = await node.dial(address)
        await peer.send("data", b"hello", timeout=5)
        assert (await inbox.receive(timeout=5))[1] == b"echo"
        process.kill()
        start = asyncio.get_running_loop().time()
        await watch.until("left")
        assert asyncio.get_running_loop().time() - start < 2
        with pytest.raises(LinkClosed):
            await peer.send("data", b"hello", timeout=5)


async def test_a_frozen_peer_is_given_up_after_the_timeout() -> None:
    """websockets#112: no call waits longer than that."""
    async with child() as (process, address), Node("parent", heartbeat=0.2, timeout=1.0) as node:
        watch = Watch(node)
        peer = await node.dial(address)
        process.send_signal(signal.SIGSTOP)
        try:
            _, reason = await watch.until("left")
            assert "nothing heard from child for 1 s" in str(reason)
            with pytest.raises(LinkClosed):
                await peer.send("data", bytes(1 << 20), timeout=5)
        finally:
            process.send_signal(signal.SIGCONT)


async def test_a_stall_of_ones_own_blames_nobody() -> None:
    """ray#13076, flower#6185: a busy CPU must not evict peers."""
    async with child() as (_, address), Node("parent", heartbeat=0.1, timeout=0.5) as node:
        inbox = node.open("data")
        watch = Watch(node)
        peer = await node.dial(address)
        # The child's own timeout is 0.5 s, so the stall here stays below it, and above this side's with the margin of a ping.
        os.sched_yield()
        deadline = asyncio.get_running_loop().time() + 0.45
        while asyncio.get_running_loop().time() < deadline:
            pass
        await peer.send("data", b"hello", timeout=5)
        assert (await inbox.receive(timeout=5))[1] == b"echo"
        assert not [event for event in watch.seen if event[0] == "left"]


async def test_a_heartbeat_overtakes_a_big_transfer() -> None:
    """websockets#1005: 200 MB under way, and a small message on another channel is not kept waiting for all of it."""
    async with pair() as (server, _, peer):
        urgent = server.open("urgent", ChannelOptions(priority=0))
        server.open("ready")
        bulk = asyncio.create_task(peer.send("data", Block(1, np.zeros(25_000_000))))
        await asyncio.wait([bulk], timeout=0.01)
        await peer.send("urgent", b"now", timeout=5)
        _, got = await urgent.receive(timeout=5)
        assert got == b"now"
        assert len(server.channel("data")) == 0, "the small message came after the big one"
        _, block = await server.channel("data").receive(timeout=30)
        assert block.values.nbytes == 200_000_000
        await bulk


async def test_a_peer_that_sends_without_credit_is_cut_off_and_the_others_notice_nothing() -> None:
    async with Node("server", listen=[HERE], memory=16 << 20) as server, Node("good") as good:
        inbox = server.open("data", ChannelOptions(messages=4, bytes=1 << 16))
        peer = await good.dial(server.addresses[0])
        watch = Watch(server)
        reader, writer = await connect_raw(server)
        about = {"peer": "bad", "instance": "x", "agent": "x", "max_message": 1 << 30, "codecs": [], "link": 1 << 20}
        writer.write(preface() + frame(FrameType.HELLO, head=codec.plain_dumps({**about, "channels": [], "meta": {}})))
        await reader.readuntil(b"channels")  # the server's HELLO: it has accepted
        writer.write(frame(FrameType.CREDIT))
        flood = frame(FrameType.DATA, 3, 1, 0, b"", b"x" * 1000)
        for number in range(200):
            writer.write(flood[:12] + struct.pack("<I", number) + flood[16:])
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
        writer.close()
        _, reason = await watch.until("left")
        assert "beyond the credit" in str(reason)
        while inbox.receive_nowait() is not None:
            pass
        await peer.send("data", b"still here", timeout=5)
        assert (await inbox.receive(timeout=5))[1] == b"still here"
        assert server.budget.peak < 1 << 20


async def test_ipv6_and_both_families_on_one_port() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    async with Node("server", listen=["tcp://[::]:0"]) as server, Node("four") as four, Node("six") as six:
        server.open("data")
        port = Address.parse(server.addresses[0]).port
        for client, host in ((four, "127.0.0.1"), (six, "[::1]")):
            peer = await client.dial(f"tcp://{host}:{port}")
            await peer.send("data", client.id.encode(), timeout=5)
        got = {(await server.channel("data").receive(timeout=5))[1] for _ in range(2)}
        assert got == {b"four", b"six"}
        assert all(Address.parse(address).port == port for address in server.addresses)


@pytest.mark.slow
async def test_a_tensor_of_600_mb_passes() -> None:
    """flower#3006, petals#372."""
    async with pair() as (server, _, peer):
        big = np.arange(150_000_000, dtype=np.float32)
        sending = asyncio.create_task(peer.send("data", Block(1, big)))
        _, got = await server.channel("data").receive(timeout=60)
        assert got.values.nbytes == big.nbytes
        assert got.values.numpy()[-1] == big[-1]
        await sending
