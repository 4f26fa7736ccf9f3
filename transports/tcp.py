"""``tcp://host:port``: the event loop's own TCP transports, handed straight to the protocol above.

Dialing and accepting go through plain sockets, because the loops' own servers differ: when the process runs out of file
descriptors, uvloop closes its listening socket without a word and asyncio logs an error for each place in the backlog;
asyncio may drop a connection that was accepted while its server closes; `Server.wait_closed` differs by version.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Any

from p2pml.address import Address, join_host_port
from p2pml.errors import AddressInUse, TransportError
from p2pml.transport import Listener, ProtocolFactory

log = logging.getLogger(__name__)

ADDRESS_SECONDS = 4.0
"""How long one address of a host may take to answer, before the next is tried."""

UNSENT_LIMIT = 256 * 1024
"""Unsent bytes that the kernel holds for a pipe whose speed is not known: what is written next waits behind no more than
these, so that control frames overtake bulk. (What is sent and not yet acknowledged doesn't count.)"""
UNSENT_SECONDS = 0.005
UNSENT_LEAST, UNSENT_MOST = 64 * 1024, 2 * 1024 * 1024
"""Once the speed is known, what the pipe carries in this time, between these bounds in bytes. A fast pipe needs more than
a slow one: two processes that wake each other for every 256 KiB on loopback take a quarter longer."""

BACKLOG = 1024
"""Connections that may wait to be accepted."""

ACCEPT_RETRY_SECONDS = 1.0
"""Pause in accepting after the process or the machine ran out of a resource, such as file descriptors."""

PORT_TRIES = 16
"""Ports tried until one is free in both address families, when any will do."""

_SHORTAGES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_SUCH_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}
_WILDCARDS = {"", "0.0.0.0", "::"}
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else None)


class TcpTransport:
    """Dials and listens over TCP, IPv4 and IPv6."""

    def __init__(self, *, address_seconds: float = ADDRESS_SECONDS) -> None:
        self._address_seconds = address_seconds

    async def dial(self, address: Address, factory: ProtocolFactory) -> asyncio.BufferedProtocol:
        """Connect to the first of the host's addresses that answers.

        Raises `TransportError` with a reason for each address. Cancelling it leaves nothing open.
        """
        if address.host in _WILDCARDS or not address.port:
            raise TransportError(f"{address}: it stands for every interface or any port, which only a listener can use")
        failures = []
        for family, endpoint in await _resolve(address):
            place = join_host_port(*endpoint[:2])
            try:
                return await _attach(await self._connect(family, endpoint), factory)
            except TimeoutError:
                failures.append(f"{place}: no answer in {self._address_seconds:g} s")
            except OSError as fault:
                failures.append(f"{place}: {_reason(fault)}")
        raise TransportError(f"{address}: cannot connect ({'; '.join(failures)})")

    def pace(self, pipe: asyncio.Transport, bytes_per_second: float) -> None:
        """See `Transport`."""
        connection = pipe.get_extra_info("socket")
        if _NOTSENT_LOWAT is not None and connection is not None:
            limit = int(min(max(bytes_per_second * UNSENT_SECONDS, UNSENT_LEAST), UNSENT_MOST))
            connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, limit)

    async def _connect(self, family: int, endpoint: Any) -> socket.socket:
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            async with asyncio.timeout(self._address_seconds):
                await _sock_connect(connecting, endpoint)
            if connecting.getsockname() == connecting.getpeername():
                # The kernel chose the dialed port as ours and connected the socket to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            _tune(connecting)
        except BaseException:
            connecting.close()
            raise
        return connecting

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Accept at every address of the host; an empty host or ``[::]`` is every interface, IPv4 and IPv6.

        All of them get the same port, also where the address asks for any (0). Raises `AddressInUse`, `TransportError`.
        """
        if address.host in ("", "::"):
            places: list[Any] = [(socket.AF_INET6, ("::",)), (socket.AF_INET, ("0.0.0.0",))]
        else:
            places = [(family, (host, *rest)) for family, (host, _, *rest) in await _resolve(address)]
        tries = 1 if address.port else PORT_TRIES
        while True:
            tries -= 1
            try:
                return _TcpListener(_bind_all(places, address.port or 0), factory)
            except OSError as fault:
                if fault.errno != errno.EADDRINUSE:
                    raise TransportError(f"{address}: cannot listen: {_reason(fault)}") from fault
                if not tries:
                    raise AddressInUse(f"{address}: the port is taken by another listener") from fault


async def _resolve(address: Address) -> list[tuple[int, Any]]:
    """(family, socket address) of each address of a host, best first."""
    host, port = address.host, address.port
    try:
        try:  # asks nobody, so it may be done here; uvloop's getaddrinfo would lose an IPv6 scope
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as fault:
        raise TransportError(f"{address}: no address is known for {host!r}: {_reason(fault)}") from fault
    return list(dict.fromkeys((family, endpoint) for family, _, _, _, endpoint in found))


async def _sock_connect(connecting: socket.socket, endpoint: Any) -> None:
    """The loop's method of that name; but uvloop's loses an IPv6 scope."""
    loop = asyncio.get_running_loop()
    if not any(endpoint[3:]) or type(loop).__module__ != "uvloop":
        return await loop.sock_connect(connecting, endpoint)
    fault = connecting.connect_ex(endpoint)
    if fault == errno.EINPROGRESS:
        writable = asyncio.Event()
        loop.add_writer(connecting, writable.set)
        try:
            await writable.wait()
        finally:
            loop.remove_writer(connecting)
        fault = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if fault:
        raise OSError(fault, os.strerror(fault))
    return None


def _reason(fault: Exception) -> str:
    # asyncio puts words of its own into strerror; those of the system say what is the matter.
    if isinstance(fault, OSError) and not isinstance(fault, socket.gaierror) and fault.errno:
        return os.strerror(fault.errno)
    return str(fault)


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _NOTSENT_LOWAT is not None:
        connection.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_LIMIT)


async def _attach(connection: socket.socket, factory: ProtocolFactory) -> asyncio.BufferedProtocol:
    """Give a connected socket, dialed or accepted, to the loop. When cancelled, the pipe is aborted.

    Two faults of uvloop are stepped around. Cancelled between connection_made and its return, it forgets
    connection_lost: hence the shield. And `create_connection`, where the protocol aborts in connection_made, leaves the
    closed descriptor in the socket object, which closes it again later, when it may be another connection's.
    """

    def give_up(attached: asyncio.Future[tuple[asyncio.Transport, asyncio.BufferedProtocol]]) -> None:
        if attached.cancelled() or attached.exception():
            connection.close()
        else:
            attached.result()[0].abort()

    attaching = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(factory, connection))
    try:
        return (await asyncio.shield(attaching))[1]
    except asyncio.CancelledError:
        attaching.add_done_callback(give_up)
        raise
    except BaseException:
        connection.close()
        raise


# --------------------------------------------------------------------------------------------------------- listening


def _bind_all(places: Iterable[Any], port: int) -> list[socket.socket]:
    """Listening sockets on one port; families that this machine lacks are left out if another is there."""
    bound: list[socket.socket] = []
    lacking: OSError | None = None
    try:
        for family, (host, *rest) in places:
            try:
                bound.append(_bind(family, (host, port, *rest)))
            except OSError as fault:
                if fault.errno not in _NO_SUCH_FAMILY:
                    raise
                lacking = fault
            else:
                port = bound[-1].getsockname()[1]
        if not bound and lacking is not None:
            raise lacking
    except BaseException:
        for listening in bound:
            listening.close()
        raise
    return bound


def _bind(family: int, endpoint: Any) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        if os.name == "posix":  # elsewhere it would let two listeners share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(endpoint)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


class _TcpListener:
    """Accepts in the reader callback itself, so that no cancellation can fall between a connection and its handler."""

    def __init__(self, sockets: list[socket.socket], factory: ProtocolFactory) -> None:
        self._loop = asyncio.get_running_loop()
        self._sockets = sockets
        self._factory = factory
        self._attaching: set[asyncio.Task[None]] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._retries: dict[socket.socket, asyncio.TimerHandle] = {}
        self.addresses = [Address("tcp", host, port) for host, port in dict.fromkeys(_dialable(sockets))]
        for listening in sockets:
            try:
                self._loop.add_reader(listening, self._accept, listening)
            except NotImplementedError:
                # The proactor loop of Windows. What it accepts in the very turn of closing is dropped.
                self._serving.append(self._loop.create_task(self._serve(listening)))

    def _accept(self, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return  # the dialer is gone already
        except OSError as fault:
            _check_shortage(fault)
            self._loop.remove_reader(listening)
            self._retries[listening] = self._loop.call_later(
                ACCEPT_RETRY_SECONDS, self._loop.add_reader, listening, self._accept, listening
            )
        else:
            self._accepted(connection)

    async def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(listening)
            except ConnectionError:
                continue
            except OSError as fault:
                _check_shortage(fault)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
            else:
                self._accepted(connection)

    def _accepted(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._hand_over(connection))
        self._attaching.add(task)
        task.add_done_callback(self._attaching.discard)

    async def _hand_over(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            _tune(connection)
            await _attach(connection, self._factory)
        except OSError as fault:
            log.info("an accepted connection was lost at once: %s", _reason(fault))
            connection.close()

    async def close(self) -> None:
        """Stop accepting. What was accepted before has its protocol when this returns, and stays open."""
        for retry in self._retries.values():
            retry.cancel()
        for task in self._serving:
            task.cancel()
        try:
            if self._serving:
                await asyncio.wait(self._serving)
        finally:
            for listening in self._sockets:
                if not self._serving and listening.fileno() >= 0:
                    self._loop.remove_reader(listening)
                listening.close()
        if self._attaching:
            await asyncio.wait(self._attaching)


def _check_shortage(fault: OSError) -> None:
    if fault.errno not in _SHORTAGES:
        raise fault
    log.warning("cannot accept, the next try is in %g s: %s", ACCEPT_RETRY_SECONDS, _reason(fault))


def _dialable(sockets: Iterable[socket.socket]) -> Iterable[tuple[str, int]]:
    for listening in sockets:
        host, port, *more = listening.getsockname()
        if host in _WILDCARDS:
            yield from ((own, port) for own in _own_hosts(listening.family))
        elif more and more[1] and "%" not in host:
            yield f"{host}%{socket.if_indextoname(more[1])}", port
        else:
            yield host, port


def _own_hosts(family: int) -> list[str]:
    """This machine's addresses as others see them: the one on the way to the internet, or those of its interfaces."""
    ipv4 = family == socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9) if ipv4 else ("2001:db8::1", 9))  # chooses a route, sends nothing
            return [probe.getsockname()[0]]
        except OSError:  # no such route, as on a LAN without a router
            pass
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    entries = [entry for name, entries in psutil.net_if_addrs().items() if name in up for entry in entries]
    hosts = [entry.address for entry in entries if entry.family == family]
    outward = [host for host in hosts if not (ip_address(host).is_loopback or ip_address(host).is_link_local)]
    return outward or ["127.0.0.1" if ipv4 else "::1"]
