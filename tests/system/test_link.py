"""Links: what happens to messages when calls are cancelled, handlers fail, and links close at the wrong moment."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from p2pml.errors import LinkClosed, MessageError, MessageRefused, P2PMLError, SendTimeout
from p2pml.link import Link, Ticket
from p2pml.node import Node, Peer
from p2pml.transports.memory import MemoryPipe
from p2pml.wire import compression, events
from p2pml.wire.options import ChannelOptions
from tests.system.nodes import HERE, Block, Note, Watch, pair

KINDS = pytest.mark.parametrize("where", [HERE, "memory://link"])
SMOOTH = np.repeat(np.arange(500, dtype=np.float32), 500)


class Fate(Ticket):
    """Writes down what becomes of a message."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def sent(self) -> None:
        self.told.append("sent")

    def delivered(self) -> None:
        self.told.append("delivered")

    def failed(self, error: P2PMLError) -> None:
        self.told.append(error)


@pytest.fixture
def slow_packing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compressing waits, in its thread, until this is set."""
    free, pack = threading.Event(), compression.wire_message

    def wait(*arguments: Any) -> Any:
        free.wait(10)
        return pack(*arguments)

    monkeypatch.setattr(compression, "wire_message", wait)
    return free


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------------ the inbox


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
        followers = [asyncio.create_task(anext(inbox, "the end")) for _ in range(2)]  # type: ignore[call-overload]
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


# ------------------------------------------------------------------------------------------------ sends and closing


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


# ------------------------------------------------------------------------------------------------ handlers


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


# ------------------------------------------------------------------------------------------------ compression


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


# ------------------------------------------------------------------------------------------------ pipes


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

    def closed(self: MemoryPipe, data: object = None) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    async with Node("server", listen=["memory://mute"]), Node("client") as client:
        peer = await client.dial("memory://mute")
        abort = MemoryPipe.abort
        monkeypatch.setattr(MemoryPipe, "write", closed)
        monkeypatch.setattr(MemoryPipe, "abort", lambda self: None)
        async with asyncio.timeout(1):
            await peer.close()
        monkeypatch.setattr(MemoryPipe, "abort", abort)
        monkeypatch.undo()


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


# ------------------------------------------------------------------------------------------------ memory


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
