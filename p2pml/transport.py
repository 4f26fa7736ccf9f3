"""What a transport is, and where to find one by URI scheme.

A transport moves bytes in order between two ends, nothing else. It speaks asyncio's own language, so there is
nothing new to learn: a pipe is an `asyncio.Transport`, and the code above it is an `asyncio.BufferedProtocol`.
Everything that makes a link good (channels, credits, heartbeats, identity) is above, once.

Rules that the conformance suite (tests/conformance) holds every transport to:

* bytes arrive complete, in order, once; the receiving memory is the one that `get_buffer` returned, always used as a
  memoryview; `get_buffer` may be called again with nothing received in between;
* `pause_writing` is called, from within `write` if need be, as soon as more than the high-water mark is buffered, and
  `resume_writing` when it is drained; with a mark of 0, `resume_writing` means that the memory given to `write` is free;
* `eof_received` or `connection_lost` follow every end of the other side, `connection_lost` exactly once, also after
  `close` (flushes what was written, as long as the other side reads) and `abort` (drops it at once);
* ``get_extra_info('peername')`` and ``('sockname')`` give a socket tuple or the text of an address, for `end_address`;
* every failure to dial or to listen is a `TransportError` that names the address and the cause.

And what a user of a pipe must respect, as the event loops do not forgive it: no `close`, `abort` or `pause_reading` from
within `get_buffer` or `resume_writing`, and nothing at all on a pipe after `connection_lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from p2pml.address import Address
from p2pml.errors import AddressError

ProtocolFactory = Callable[[], asyncio.BufferedProtocol]


class Listener(Protocol):
    """An open listening address."""

    @property
    def addresses(self) -> list[Address]:
        """Where it can be dialed from elsewhere: real ports, and real hosts in place of wildcards."""

    async def close(self) -> None:
        """Stop accepting; accepted pipes stay open."""


class Transport(Protocol):
    """Dials and listens for one or more URI schemes."""

    async def dial(self, address: Address, factory: ProtocolFactory) -> asyncio.BufferedProtocol:
        """Connect to `address` and return the protocol made by `factory`, its `connection_made` called.

        Cancelling it leaves nothing open. Raises `TransportError`.
        """

    async def listen(self, address: Address, factory: ProtocolFactory) -> Listener:
        """Accept pipes at `address`, one protocol of `factory` for each. Raises `TransportError`, `AddressInUse`."""

    def pace(self, pipe: asyncio.Transport, bytes_per_second: float) -> None:
        """The pipe carries so much: buffer, below `write`, what that takes a few milliseconds, and no more.

        A transport without buffers of its own below a pipe does nothing.
        """


_BUILT_IN = {
    "tcp": "p2pml.transports.tcp:TcpTransport",
    "memory": "p2pml.transports.memory:MemoryTransport",
}
_registered: dict[str, Transport] = {}


def register(scheme: str, transport: Transport) -> None:
    """Use `transport` for addresses of `scheme` in this process, in place of any other."""
    _registered[scheme] = transport


def transport_for(address: Address) -> Transport:
    """The transport for an address: registered by hand, built in, or a third party's entry point.

    A third party's package declares it in the entry-point group ``p2pml.transports``, the scheme as the name and the
    class as the object. Raises `AddressError` with the schemes there are.
    """
    found = _registered.get(address.scheme)
    if found is not None:
        return found
    if address.scheme in _BUILT_IN:
        module, _, name = _BUILT_IN[address.scheme].partition(":")
        made = getattr(import_module(module), name)()
    else:
        from importlib.metadata import entry_points  # takes 30 ms, and most programs never need it

        others = {entry.name: entry for entry in entry_points(group="p2pml.transports")}
        if address.scheme not in others:
            known = ", ".join(sorted({*_BUILT_IN, *_registered, *others}))
            raise AddressError(f"{address}: no transport for '{address.scheme}://' (there are: {known})")
        made = others[address.scheme].load()()
    _registered[address.scheme] = made
    transport: Transport = made
    return transport
