"""Dialing: cancelled, meeting itself, refused; and links that are dialed again when they are lost."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from p2pml.address import Address
from p2pml.errors import (
    LinkClosed,
    ProtocolError,
    TransportError,
)
from p2pml.node import FIRST_DELAY, LAST_DELAY, MAX_PENDING, Node
from p2pml.peer import Peer
from p2pml.transport import transport_for
from p2pml.wire.session import Session
from tests.system.nodes import HERE, Watch, pair, turns

KINDS = pytest.mark.parametrize("where", [HERE, "memory://life"])


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
