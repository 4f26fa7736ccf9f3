"""Nodes over time: dialing that is cancelled or meets itself, links that are kept, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from p2pml.address import Address
from p2pml.errors import (
    AddressInUse,
    LinkClosed,
    MessageError,
    MessageTooLarge,
    P2PMLError,
    ProtocolError,
    TransportError,
)
from p2pml.node import FIRST_DELAY, LAST_DELAY, MAX_PENDING, Node, Peer
from p2pml.transport import transport_for
from p2pml.wire.options import ChannelOptions
from p2pml.wire.session import Session
from tests.system.nodes import HERE, Note, Watch, pair

KINDS = pytest.mark.parametrize("where", [HERE, "memory://life"])


async def turns(count: int) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------ beginning and end


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


# ------------------------------------------------------------------------------------------------ dialing


@KINDS
async def test_a_dial_cancelled_at_any_await_leaves_nothing(where: str) -> None:
    async with Node("server", listen=[where]) as server, Node("client") as client:
        told = Watch(server)
        for count in range(30):
            dialing = asyncio.create_task(client.dial(server.addresses[0]))
            await turns(count)
            dialing.cancel()
            await asyncio.wait([dialing])
            if not dialing.cancelled():
                await dialing.result().close()
            async with asyncio.timeout(10):
                while left := [link.finished for link in client._links | server._links]:
                    await asyncio.wait(left)
                    await turns(1)
        assert not client._dials
        seen = [what for what, _, _ in told.seen if what in ("joined", "left")]
        assert seen == ["joined", "left"] * (len(seen) // 2)
        assert server.budget.used == client.budget.used == 0
        await client.dial(server.addresses[0])


@KINDS
async def test_dialing_each_other_tells_one_arrival_and_one_departure(where: str) -> None:
    for _ in range(10):
        async with Node("a", listen=[where + "a" if where != HERE else HERE]) as a:
            async with Node("b", listen=[where + "b" if where != HERE else HERE]) as b:
                watches = [Watch(a), Watch(b)]
                await asyncio.gather(a.dial(b.addresses[0]), b.dial(a.addresses[0]))
                for watch in watches:
                    await watch.until("joined")
            await watches[0].until("left")
        for watch in watches:
            assert [what for what, _, _ in watch.seen if what in ("joined", "left")] == ["joined", "left"]


async def test_closing_a_node_ends_its_dials() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        client = Node("client")
        await client.__aenter__()
        dialing = asyncio.create_task(client.dial(address))
        waiting = asyncio.create_task(client._joined("nobody"))
        async with asyncio.timeout(5):
            while not client._dials:
                await turns(1)
        await client.__aexit__(None, None, None)
        for task in (dialing, waiting):
            with pytest.raises(LinkClosed, match="shuts down"):
                await task
        with pytest.raises(TransportError, match=r"no answer within 0.05 s"):
            async with Node("patient") as patient:
                await patient.dial(address, timeout=0.05)


async def test_a_dial_that_is_connected_as_its_node_closes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Node("server", listen=["memory://late"]):
        client = Node("client")
        await client.__aenter__()
        transport = transport_for(Address.parse("memory://late"))
        dial = transport.dial

        async def slow(*arguments: object) -> object:
            await client.__aexit__(None, None, None)
            return await dial(*arguments)

        monkeypatch.setattr(transport, "dial", slow)
        with pytest.raises(LinkClosed, match="closed meanwhile"):
            await client.dial("memory://late")
        await turns(5)
        assert not client._links


async def test_a_link_that_only_the_other_side_still_has_is_no_peer_here() -> None:
    """The other side's link is half open: it says so, and in the error it says why there was no answer."""
    async with pair() as (server, client, _):
        del client.peers["server"]
        with pytest.raises(TransportError, match=r"server has another link to this node, which does not open here"):
            await client.dial(server.addresses[0], timeout=0.1)


async def test_what_answers_and_is_no_peer_is_a_breach_of_protocol() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web, Node("client") as client:
        port = web.sockets[0].getsockname()[1]
        with pytest.raises(ProtocolError, match="not a p2pml peer"):
            await client.dial(f"tcp://127.0.0.1:{port}")


@pytest.fixture
def few_files() -> Iterator[int]:
    """This process may open few more files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        limit = probe.fileno() + 12
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_process_without_file_descriptors_says_so_and_recovers(few_files: int) -> None:
    """cpython#151615."""
    async with Node("server", listen=[HERE]) as server, Node("client") as client:
        inbox = server.open("data")
        hoard: list[socket.socket] = []
        try:
            while len(hoard) < few_files:
                with suppress(OSError):
                    hoard.append(socket.socket())
                    continue
                break
            with pytest.raises(TransportError, match="Too many open files"):
                await client.dial(server.addresses[0])
        finally:
            for held in hoard:
                held.close()
        peer = await client.dial(server.addresses[0])
        await peer.send("data", b"again", timeout=5)
        assert (await inbox.receive(timeout=5))[1] == b"again"


async def test_connections_that_are_being_dropped_do_not_keep_newcomers_out() -> None:
    async with Node("server", listen=[HERE], handshake=0.1) as server, Node("client") as client:
        where = Address.parse(server.addresses[0])
        silent = [await asyncio.open_connection(where.host, where.port) for _ in range(MAX_PENDING)]
        for reader, _ in silent:  # told goodbye, and they do not answer it
            async with asyncio.timeout(5):
                while await reader.read(1 << 16):
                    pass
        assert len(server._links) == MAX_PENDING
        await client.dial(server.addresses[0])
        for _, writer in silent:
            writer.close()


# ------------------------------------------------------------------------------------------------ kept links


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The upper bounds of the pauses between dials; the pauses themselves are none."""
    bounds: list[float] = []

    def uniform(low: float, high: float) -> float:
        assert low == 0
        bounds.append(high)
        return 0.0

    make = Node.__init__

    def init(self: Node, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(self._random, "uniform", uniform)

    monkeypatch.setattr(Node, "__init__", init)
    return bounds


async def test_the_pauses_between_dials_grow_at_random_and_not_for_ever(pauses: list[float]) -> None:
    """nats.go#563."""
    async with Node("client") as client:
        watch = Watch(client)
        async with Node("server", listen=["memory://back"]):
            await client.dial("memory://back", keep=True)
        await watch.until("left")
        async with asyncio.timeout(5):
            while len(pauses) < 12:
                await turns(1)
        assert pauses[:4] == [FIRST_DELAY * factor for factor in (1, 2, 4, 8)]
        assert pauses[11] == LAST_DELAY
        watch.seen.clear()
        async with Node("server", listen=["memory://back"]) as server:
            await watch.until("joined")
            pauses.clear()
            await server.peers["client"].close() if "client" in server.peers else None
            await watch.until("left")
            watch.seen.clear()
            await watch.until("joined")
            assert pauses[0] == FIRST_DELAY  # a link that stood begins anew


@pytest.mark.parametrize("moment", ["linked", "pausing"])
async def test_a_peer_closed_on_this_side_is_not_dialed_again(moment: str, pauses: list[float]) -> None:
    async with Node("client") as client:
        watch = Watch(client)
        server = Node("server", listen=["memory://gone"])
        await server.__aenter__()
        peer = await client.dial("memory://gone", keep=True)
        assert await client.dial("memory://gone", keep=True) is peer
        assert len(client._kept) == 1
        if moment == "linked":
            await peer.close()
        await server.__aexit__(None, None, None)
        await watch.until("left")
        if moment == "pausing":
            async with asyncio.timeout(5):
                while not pauses:
                    await turns(1)
            await peer.close()
        await turns(5)
        assert not client._kept
        assert not client._background


async def test_a_peer_that_comes_back_under_another_name_is_kept_under_that(pauses: list[float]) -> None:
    async with Node("client") as client:
        watch = Watch(client)
        async with Node(listen=["memory://anew"]) as first:
            await client.dial("memory://anew", keep=True)
        await watch.until("left")
        watch.seen.clear()
        async with Node(listen=["memory://anew"]) as second:
            assert await watch.until("joined") == (second.id, None)
            async with asyncio.timeout(5):
                while second.id not in client._kept:
                    await turns(1)
            assert first.id not in client._kept
            await client.peers[second.id].close()
            await turns(5)
            assert not client._kept
            assert not client._background


async def test_a_peer_closed_as_it_joins_again_is_not_dialed_any_more(pauses: list[float]) -> None:
    async with Node("client") as client:
        dropped: list[str] = []

        def drop(what: str, peer: Peer, detail: object) -> None:
            if what == "joined":
                dropped.append(peer.id)
                peer.drop("not you again")

        async with Node(listen=["memory://again"]):
            await client.dial("memory://again", keep=True)
        client.watch(drop)
        async with Node(listen=["memory://again"]) as second:
            await asyncio.wait(client._background, timeout=5)
            assert dropped == [second.id]
            assert not client._kept


async def test_a_refusal_for_good_ends_the_keeping_and_another_does_not(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Node("client") as client:
        async with Node("server", listen=["memory://refuse"]):
            await client.dial("memory://refuse", keep=True)
        (keeper,) = client._background
        async with Node("server", listen=["memory://refuse"]) as server:
            answers = iter([True, True, False])
            monkeypatch.setattr(
                server, "said_hello", lambda link, hello: Session.refuse(link.session, "no", retry=next(answers))
            )
            await asyncio.wait([keeper], timeout=5)
        assert next(answers, None) is None
        assert "memory://refuse is not dialed again" in caplog.text
        assert not client._kept
        with pytest.raises(TransportError):
            await client.dial("memory://refuse", keep=True)


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


# ------------------------------------------------------------------------------------------------ what a node tells


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
