"""Links: what happens to messages when calls are cancelled, handlers fail, and links close at the wrong moment."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from p2pml.errors import LinkClosed, MessageError, MessageRefused, SendTimeout
from p2pml.link import Link
from p2pml.node import Node
from p2pml.peer import Peer
from p2pml.transports.memory import MemoryPipe
from p2pml.wire import events
from p2pml.wire.options import ChannelOptions
from tests.system.nodes import HERE, SMOOTH, Block, Fate, Note, Watch, pair, turns

KINDS = pytest.mark.parametrize("where", [HERE, "memory://link"])


@KINDS
async def test_sending_on_a_closed_link_is_one_error(where: str) -> None:
    """uvloop#506: a write after close is silent on asyncio and a RuntimeError on uvloop."""
    async with Node("server", listen=[where]) as server, Node("client") as client:
        server.open("data")
        watch = Watch(server)
        peer = await client.dial(server.addresses[0])
        await watch.until("joined")
        back = server.peers["client"]
        peer.drop("enough")
        for message in (b"x", Note("x"), Block(1, SMOOTH)):
            with pytest.raises(LinkClosed, match="enough"):
                await peer.send("data", message, timeout=5)
            with pytest.raises(LinkClosed, match="enough"):
                peer.link.submit("data", message)
            assert not peer.try_send("data", message)
        await watch.until("left")
        with pytest.raises(LinkClosed, match="client closed the link: enough"):
            await back.send("data", b"x")
        assert repr(peer) == "<Peer server (closed)>"
        await peer.close()


async def test_a_link_closed_for_a_breach_of_protocol_is_closed_like_any_other_for_who_sends() -> None:
    async with pair() as (server, client, peer):
        watch = Watch(client)
        sending = asyncio.create_task(peer.send("nowhere", Block(1, SMOOTH)))
        await turns(2)
        back = server.peers["client"]
        back.link.session.shared.control.append(bytes(16))  # a frame of an unknown type
        back.link.kick()
        _, reason = await watch.until("left")
        with pytest.raises(LinkClosed, match="frame") as caught:
            await sending
        assert str(caught.value) == reason
        with pytest.raises(LinkClosed, match="frame"):
            await peer.send("data", b"x")


@KINDS
async def test_small_messages_before_a_close_arrive(where: str) -> None:
    async with Node("server", listen=[where]) as server, Node("client") as client:
        inbox = server.open("data")
        peer = await client.dial(server.addresses[0])
        for number in range(100):
            await peer.send("data", Note("", number))
        peer.drop()
        assert [(await inbox.receive(timeout=5))[1].number for _ in range(100)] == list(range(100))


@pytest.mark.parametrize("size", [10, 300_000])
async def test_a_send_cancelled_at_any_await_arrives_whole_or_not_at_all(size: int) -> None:
    async with pair() as (server, _, peer):
        inbox = server.channel("data")
        for count in range(25):
            values = np.full(size, count, np.float32)
            sending = asyncio.create_task(peer.send("data", Block(count, values), delivered=bool(count % 2)))
            await turns(count)
            sending.cancel()
            await asyncio.wait([sending])
            await peer.send("data", Note("next"), timeout=5)
            _, got = await inbox.receive(timeout=5)
            if isinstance(got, Block):
                assert got.number == count
                assert np.array_equal(got.values.numpy(), values)
                _, got = await inbox.receive(timeout=5)
            assert got == Note("next")
        session = server.peers["client"].link.session
        assert session.receiver.link.received == session.receiver.link.consumed


async def test_a_send_that_is_done_in_the_turn_of_its_timeout_is_done() -> None:
    async with pair() as (server, _, peer):
        submit = peer.link.submit

        def late(channel: str, message: Any, ticket: Any = None, **options: Any) -> None:
            asyncio.get_running_loop().call_later(0.01, ticket.sent)
            submit("nowhere", message, ticket, **options)

        peer.link.submit = late  # type: ignore[method-assign]
        for timeout in np.linspace(0.009, 0.011, 20):
            try:
                await peer.send("data", Block(1, SMOOTH), timeout=float(timeout))
            except SendTimeout:
                continue
        assert len(server.peers) == 1


async def test_an_unacknowledged_message_says_so() -> None:
    async with pair() as (server, _, peer):
        server.peers["client"].link.session.receiver.acknowledge = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SendTimeout, match=r"server has not acknowledged a message on 'data' .*may yet arrive"):
            await peer.send("data", b"x", delivered=True, timeout=0.1)


@KINDS
@pytest.mark.parametrize("orderly", [True, False])
async def test_every_message_on_a_link_that_goes_away_fails_once(where: str, orderly: bool) -> None:
    async with Node("server", listen=[where]) as server, Node("client") as client:
        server.open("data", ChannelOptions(messages=4))
        watch = Watch(server)
        peer = await client.dial(server.addresses[0])
        await watch.until("joined")
        fates = []
        for number in range(12):
            fates.append(Fate())
            values = SMOOTH if number % 2 else SMOOTH[:10]
            peer.link.submit("data", Block(number, values), fates[-1], tracked=number % 3 == 0)
        await turns(3)
        if orderly:
            peer.drop("gone")
        else:
            server.peers["client"].link.abort("gone")
        async with asyncio.timeout(5):
            await peer.link.finished
        for fate in fates:
            last = fate.told[-1]
            assert isinstance(last, LinkClosed) or last in ("sent", "delivered")
            assert len([word for word in fate.told if word not in ("sent", "delivered")]) <= 1
            assert len(set(map(str, fate.told))) == len(fate.told)
        assert isinstance(fates[-1].told[-1], LinkClosed)


async def test_memory_that_is_no_message() -> None:
    async with pair() as (_, _, peer):
        with pytest.raises(MessageError, match="contiguous"):
            await peer.send("data", memoryview(bytes(100))[::2])
        with pytest.raises(MessageError, match="contiguous"):
            peer.try_send("data", memoryview(bytes(100))[::2])


async def test_views_of_any_shape_are_sent_as_bytes() -> None:
    async with pair() as (server, _, peer):
        for memory in (np.ones((2, 3), np.float32).data, bytearray(b"abc"), memoryview(b""), np.ones((0, 3)).data):
            assert peer.try_send("data", memory)
            assert (await server.channel("data").receive(timeout=5))[1] == memoryview(memory).tobytes()


@pytest.mark.allow_error_logs
async def test_a_handler_that_raises_closes_its_link_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with Node("server", listen=[HERE]) as server, Node("good") as good, Node("bad") as bad:

        def handle(peer: Peer, arrived: events.Arrived) -> None:
            peer.link.consumed(arrived)
            if peer.id == "bad":
                raise LookupError("what is this?")

        server.open("data", handler=handle)
        watch = Watch(server)
        peer, other = await good.dial(server.addresses[0]), await bad.dial(server.addresses[0])
        await other.send("data", b"x", timeout=5)
        assert await watch.until("left") == ("bad", "it failed here: LookupError")
        assert "what is this?" in caplog.text
        await peer.send("data", b"x", delivered=True, timeout=5)


@pytest.mark.allow_error_logs
async def test_a_watcher_or_a_place_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with Node("server", listen=[HERE]) as server, Node("client") as client:

        def refuse(what: str, peer: Peer, detail: object) -> None:
            raise LookupError("a bad watcher")

        def nowhere(peer: str, head: object) -> object:
            raise LookupError("a bad place")

        server.watch(refuse)
        watch = Watch(server)
        server.open("data", place=nowhere)
        peer = await client.dial(server.addresses[0])
        await watch.until("joined")
        with pytest.raises(MessageRefused, match="failed to find a place"):
            await peer.send("data", Block(1, SMOOTH), timeout=5)
        await peer.send("data", b"next", delivered=True, timeout=5)
        assert "a bad watcher" in caplog.text
        assert "a bad place" in caplog.text


@KINDS
async def test_a_link_closed_by_a_handler_tells_in_order_and_once(where: str) -> None:
    async with Node("server", listen=[where]) as server, Node("client") as client:
        told: list[str] = []

        def handle(peer: Peer, arrived: events.Arrived) -> None:
            told.append(str(bytes(arrived.message)))
            peer.link.consumed(arrived)
            peer.drop("enough")

        server.open("data", handler=handle)
        server.watch(lambda what, peer, detail: told.append(what) if what in ("joined", "left") else None)
        watch = Watch(server)
        peer = await client.dial(server.addresses[0])
        await watch.until("joined")
        for _ in range(5):
            peer.try_send("data", b"x")
        await watch.until("left")
        await turns(5)
        assert told == ["joined", *["b'x'"] * (len(told) - 2), "left"]
        assert server.budget.used == 0


async def stuck(server: Node, peer: Peer, *, tracked: bool) -> tuple[Fate, Link]:
    """Hand out all of a message of which the last part stays in the transport, as the other side does not read."""
    back = server.peers["client"].link
    await peer.send("data", b"x", delivered=True, timeout=5)
    assert back.transport is not None
    back.transport.pause_reading()
    fate = Fate()
    peer.link.session.sender._channel("data").eager = 1 << 20  # goes out without being accepted
    peer.link.submit("data", Block(1, SMOOTH[:90_000]), fate, tracked=tracked)
    await turns(3)
    assert peer.link._written
    assert fate.told == []
    return fate, back


@pytest.mark.parametrize("tracked", [True, False])
async def test_what_is_stuck_in_the_transport_when_the_connection_breaks_has_failed(tracked: bool) -> None:
    async with Node("server", listen=["memory://stuck"]) as server, Node("client") as client:
        server.open("data")
        watch = Watch(server)
        peer = await client.dial("memory://stuck")
        await watch.until("joined")
        fate, back = await stuck(server, peer, tracked=tracked)
        back.abort("cut")
        await peer.link.finished
        assert [type(word) for word in fate.told] == [LinkClosed]


@pytest.mark.parametrize("tracked", [True, False])
async def test_what_is_stuck_in_the_transport_at_a_close_is_told_when_its_memory_is_free(tracked: bool) -> None:
    async with Node("server", listen=["memory://stuck"]) as server, Node("client") as client:
        server.open("data")
        watch = Watch(server)
        peer = await client.dial("memory://stuck")
        await watch.until("joined")
        fate, back = await stuck(server, peer, tracked=tracked)
        peer.drop("enough")
        assert fate.told == []
        assert back.transport is not None
        back.transport.resume_reading()
        await peer.link.finished
        assert [str(word) for word in fate.told] == ["enough" if tracked else "sent"]


async def test_a_batch_that_is_full_goes_out_in_the_same_turn() -> None:
    async with pair() as (server, _, peer):
        for number in range(2000):
            assert peer.try_send("data", number.to_bytes(2, "big") * 50)
        for number in range(2000):
            assert (await server.channel("data").receive(timeout=5))[1][:2] == number.to_bytes(2, "big")


async def test_a_pipe_that_cannot_be_half_closed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over TLS."""
    monkeypatch.setattr(MemoryPipe, "can_write_eof", lambda self: False)
    async with Node("server", listen=["memory://whole"]) as server, Node("client") as client:
        server.open("data")
        watch = Watch(server)
        peer = await client.dial("memory://whole")
        await peer.send("data", b"x", timeout=5)
        async with asyncio.timeout(1):
            await peer.close("enough")
        assert await watch.until("left") == ("client", "client closed the link: enough")
        assert (await server.channel("data").receive(timeout=5))[1] == b"x"


async def test_a_pipe_that_ends_and_does_not_say_so_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with uvloop, where the making of a pipe was cancelled."""

    def closed(data: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    async with Node("server", listen=["memory://mute"]), Node("client") as client:
        peer = await client.dial("memory://mute")
        pipe = peer.link.transport
        monkeypatch.setattr(pipe, "write", closed)
        monkeypatch.setattr(pipe, "abort", lambda: None)
        async with asyncio.timeout(1):
            await peer.close()
        monkeypatch.undo()
        assert pipe is not None
        pipe.abort()


async def test_a_link_closed_before_it_has_a_pipe_drops_the_pipe_when_it_comes() -> None:
    async with Node("server", listen=["memory://early"]) as server, Node("client") as client:
        dialing = asyncio.create_task(client.dial("memory://early"))
        await turns(1)
        (waiting,) = [link for link in server._links if link.transport is None]
        waiting.close("never mind")
        with pytest.raises(LinkClosed):
            await dialing
        async with asyncio.timeout(5):
            await waiting.finished
        assert not client.peers


async def test_the_budget_is_whole_again_after_links_closed_in_every_state() -> None:
    async with Node("server", listen=[HERE], memory=8 << 20) as server:
        inbox = server.open("data", ChannelOptions(messages=8))
        for state in ("idle", "unread", "offered", "halfway"):
            async with Node(state) as client:
                watch = Watch(server)
                peer = await client.dial(server.addresses[0])
                await watch.until("joined")
                sending: list[asyncio.Task[None]] = []
                if state == "unread":
                    for message in (b"x", Note("x"), Block(1, SMOOTH)):
                        await peer.send("data", message, delivered=True, timeout=5)
                elif state == "offered":  # one fills the memory, the others wait for it
                    sending = [asyncio.create_task(peer.send("data", bytes(6 << 20))) for _ in range(3)]
                    async with asyncio.timeout(5):
                        while not inbox:
                            await turns(1)
                elif state == "halfway":
                    sending = [asyncio.create_task(peer.send("data", bytes(6 << 20)))]
                    async with asyncio.timeout(5):
                        while client.bytes_out < 1 << 20:
                            await turns(1)
                link = server.peers[state].link
                link.abort("cut")
                await link.finished
                await asyncio.gather(*sending, return_exceptions=True)
            while inbox.receive_nowait() is not None:
                pass
            assert server.budget.used == 0, state
            assert server.budget.fixed == 0, state


async def test_two_hundred_links_leave_nothing_behind() -> None:
    """hivemind#264."""
    links: weakref.WeakSet[Link] = weakref.WeakSet()
    async with Node("server", listen=["memory://flat"]) as server, Node("client") as client:
        inbox = server.open("data")
        told: list[str] = []
        server.watch(lambda what, peer, detail: told.append(what) if what in ("joined", "left") else None)
        link = server._link

        def remember(*arguments: Any, **options: Any) -> Link:
            made = link(*arguments, **options)
            links.add(made)
            return made

        server._link = remember  # type: ignore[method-assign]
        for number in range(200):
            peer = await client.dial("memory://flat")
            await peer.send("data", Note("", number), timeout=5)
            assert (await inbox.receive(timeout=5))[1].number == number
            if number % 3:
                await peer.close()
            else:
                peer.link.abort("cut")
                await peer.link.finished
            async with asyncio.timeout(5):
                while server.peers:
                    await turns(1)
        await turns(5)
        del peer
        gc.collect()
        assert told == ["joined", "left"] * 200
        assert len(links) == 0
        assert not server._links
        assert not server._accepted
        assert not client._dials
        assert server.budget.used == 0
