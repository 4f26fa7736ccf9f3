from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from p2pml.address import Address, end_address
from p2pml.errors import AddressInUse, TransportError
from p2pml.transport import Transport, transport_for
from p2pml.transports import tcp
from p2pml.transports.tcp import TcpTransport
from tests.conformance.ground import TICKS, Ground
from tests.conformance.recorder import Recorder
from tests.conformance.suite import TransportSuite


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _link_local() -> str | None:
    """A link-local address with its scope, as in 'fe80::1%eth0'."""
    for index, name in socket.if_nameindex():
        for _, _, _, _, endpoint in socket.getaddrinfo("fe80::%" + name, 0, socket.AF_INET6, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect((*endpoint[:1], 9, 0, index))
                except OSError:
                    continue
                own = probe.getsockname()[0].partition("%")[0]
                if own.startswith("fe80"):
                    return f"{own}%{name}"
    return None


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")


class TestTcp(TransportSuite):
    place = "tcp://127.0.0.1:0"

    def transport(self) -> Transport:
        return TcpTransport()

    def address(self) -> Address:
        return Address.parse(self.place)


@needs_ipv6
class TestTcpOverIPv6(TestTcp):
    place = "tcp://[::1]:0"


@needs_ipv6
class TestTcpOnEveryInterface(TestTcp):
    place = "tcp://:0"


@pytest.fixture
async def ground() -> AsyncIterator[Ground]:
    ground = Ground(TcpTransport(), Address.parse("tcp://127.0.0.1:0"))
    yield ground
    await ground.end()


async def _listen(ground: Ground, place: str) -> list[Address]:
    await ground.listen(place=Address.parse(place))
    return ground.listeners[-1].addresses


# ---------------------------------------------------------------------------------------------------- addresses


@needs_ipv6
@pytest.mark.parametrize("place", ["tcp://:0", "tcp://[::]:0"])
async def test_both_families_share_a_port(ground: Ground, place: str) -> None:
    port = (await _listen(ground, place))[0].port
    assert {address.port for address in ground.listeners[0].addresses} == {port}
    for host in ("127.0.0.1", "[::1]"):
        await ground.dial(Address.parse(f"tcp://{host}:{port}"))
        await ground.next_accepted()
    for taken in (f"tcp://127.0.0.1:{port}", f"tcp://[::1]:{port}", f"tcp://:{port}"):
        with pytest.raises(AddressInUse):
            await ground.listen(place=Address.parse(taken))


@needs_ipv6
async def test_another_port_is_tried_when_one_family_lacks_it(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("0.0.0.0", 0)) as holder:
        taken = holder.getsockname()[1]
        bind, asked = tcp._bind, []

        def bind_where_ipv4_is_taken(family: int, endpoint: Any) -> socket.socket:
            asked.append(endpoint)
            first = family == socket.AF_INET6 and len(asked) == 1
            return bind(family, (endpoint[0], taken) if first else endpoint)

        monkeypatch.setattr(tcp, "_bind", bind_where_ipv4_is_taken)
        port = (await _listen(ground, "tcp://:0"))[0].port
    assert asked == [("::", 0), ("0.0.0.0", taken), ("::", 0), ("0.0.0.0", port)]
    assert port != taken


async def test_without_ipv6_every_interface_is_ipv4(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = tcp._bind

    def bind_without_ipv6(family: int, endpoint: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return bind(family, endpoint)

    monkeypatch.setattr(tcp, "_bind", bind_without_ipv6)
    (address,) = await _listen(ground, "tcp://:0")
    assert ":" not in address.host
    await ground.dial(address)
    with pytest.raises(TransportError, match="Address family not supported"):
        await ground.listen(place=Address.parse("tcp://[::1]:0"))


@pytest.mark.skipif(_link_local() is None, reason="this machine has no link-local IPv6 address")
async def test_the_scope_of_a_link_local_address_is_kept(ground: Ground) -> None:
    host = _link_local()
    (address,) = await _listen(ground, f"tcp://[{host}]:0")
    assert address.host == host
    near, far = await ground.dial(address), await ground.next_accepted()
    await near.send(b"x")
    await far.has(1)
    assert end_address("tcp", near.peername) == end_address("tcp", far.sockname) == address
    await ground.listeners[0].close()
    with pytest.raises(TransportError, match="Connect"):
        await ground.transport.dial(address, Recorder)


def test_own_hosts_where_there_is_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unrouted(socket.socket):
        def connect(self, endpoint: Any) -> None:
            raise OSError(errno.ENETUNREACH, "unreachable")

    monkeypatch.setattr(socket, "socket", Unrouted)
    for family in (socket.AF_INET, socket.AF_INET6):
        hosts = tcp._own_hosts(family)
        assert hosts
        assert not set(hosts) & {"0.0.0.0", "::"}
        assert len(hosts) == 1 or not set(hosts) & {"127.0.0.1", "::1"}


@pytest.mark.parametrize("place", ["tcp://192.0.2.77:0", "tcp://[fe80::1%nosuch0]:0"])
async def test_listening_where_this_machine_is_not(ground: Ground, place: str) -> None:
    with pytest.raises(TransportError) as failed:
        await ground.listen(place=Address.parse(place))
    assert place in str(failed.value)
    assert not isinstance(failed.value, AddressInUse)


# ---------------------------------------------------------------------------------------------------- dialing


@pytest.mark.parametrize("address", ["tcp://:7700", "tcp://0.0.0.0:7700", "tcp://[::]:7700", "tcp://127.0.0.1:0"])
async def test_dialing_what_only_a_listener_can_use(address: str) -> None:
    with pytest.raises(TransportError, match="only a listener") as refused:
        await TcpTransport().dial(Address.parse(address), Recorder)
    assert address in str(refused.value)


@contextlib.contextmanager
def _black_hole() -> Iterator[Any]:
    """An endpoint that doesn't answer: its queue of connections is full."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        waiting = []
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(listening.getsockname())
        try:
            yield listening.getsockname()
        finally:
            for one in waiting:
                one.close()


async def test_an_address_that_does_not_answer_is_given_up(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    address = await ground.listen()
    with _black_hole() as hole:
        known: list[tuple[int, Any]] = [(socket.AF_INET, hole), (socket.AF_INET, ("127.0.0.1", address.port))]

        async def resolve(address: Address) -> list[tuple[int, Any]]:
            return known

        monkeypatch.setattr(tcp, "_resolve", resolve)
        transport = TcpTransport(address_seconds=0.2)
        ground.transport = transport
        await ground.dial(address)
        await ground.listeners[0].close()
        with pytest.raises(TransportError) as failed:
            await transport.dial(address, Recorder)
    assert f"127.0.0.1:{hole[1]}: no answer in 0.2 s" in str(failed.value)
    assert f"127.0.0.1:{address.port}: Connect" in str(failed.value)


async def test_cancelling_a_dial_that_waits(ground: Ground) -> None:
    with _black_hole() as (host, port):
        dialing = asyncio.ensure_future(TcpTransport().dial(Address("tcp", host, port), Recorder))
        for _ in TICKS:
            await asyncio.sleep(0)
        dialing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialing


async def test_a_socket_that_the_kernel_connects_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = free.getsockname()

    class OnDialedPort(socket.socket):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.bind(endpoint)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", OnDialedPort)
        with pytest.raises(OSError, match="Connection refused"):
            await TcpTransport()._connect(socket.AF_INET, endpoint)


async def test_socket_options_of_both_ends(ground: Ground) -> None:
    for end in await ground.pair():
        sock = end.pipe.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if tcp._NOTSENT_LOWAT is not None:
            assert sock.getsockopt(socket.IPPROTO_TCP, tcp._NOTSENT_LOWAT) == tcp.UNSENT_LIMIT


# ---------------------------------------------------------------------------------------------------- accepting


@contextlib.contextmanager
def _no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 4, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when accepting pauses."""
    event = asyncio.Event()
    check = tcp._check_shortage

    def check_and_tell(fault: OSError) -> None:
        check(fault)
        event.set()

    monkeypatch.setattr(tcp, "_check_shortage", check_and_tell)
    return event


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
async def test_without_file_descriptors_accepting_pauses_and_goes_on(
    ground: Ground, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, warned: asyncio.Event
) -> None:
    monkeypatch.setattr(tcp, "ACCEPT_RETRY_SECONDS", 0.1)
    address = await ground.listen()
    with socket.socket() as dialer:
        with _no_descriptors_left():
            dialer.connect((address.host, address.port))
            await warned.wait()
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(caplog.messages) == 1  # it doesn't spin
            assert "Too many open files" in caplog.messages[0]
        dialer.send(b"x")
        await (await ground.next_accepted()).has(1)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
async def test_closing_while_accepting_pauses(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, warned: asyncio.Event
) -> None:
    monkeypatch.setattr(tcp, "ACCEPT_RETRY_SECONDS", 0.01)
    address = await ground.listen()
    with socket.socket() as dialer:
        with _no_descriptors_left():
            dialer.connect((address.host, address.port))
            await warned.wait()
            await ground.listeners[0].close()
        await asyncio.sleep(0.03)  # the retry would have come
    assert ground.accepted.empty()


async def test_a_dialer_that_is_gone_before_it_is_served(ground: Ground) -> None:
    address = await ground.listen()
    for _ in range(20):
        with socket.create_connection((address.host, address.port)) as dialer:
            dialer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets
    near = await ground.dial(address)
    while (far := await ground.next_accepted()).peername != near.sockname:
        await far.until(lambda far: far.lost)


@pytest.mark.one_loop
@pytest.mark.parametrize("sent", [0, 1, 10])
async def test_a_loop_without_add_reader(ground: Ground, monkeypatch: pytest.MonkeyPatch, sent: int) -> None:
    def absent(*arguments: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_reader", absent)
    address = await ground.listen(lambda: Recorder(echo=True))
    if sent:  # otherwise the listener is closed before it began
        near = await ground.dial(address)
        for _ in range(sent):
            await near.send(b"x")
        await near.has(sent)
    await ground.listeners[0].close()
    with pytest.raises(TransportError):
        await ground.dial(address)


def test_it_is_found_by_scheme() -> None:
    assert isinstance(transport_for(Address.parse("tcp://127.0.0.1")), TcpTransport)
