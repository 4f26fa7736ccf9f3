"""Where a peer can be found, as one line of text: ``scheme://host:port/path``.

=======================  ==========================================================================
``tcp://10.0.0.2:7700``  IPv4; without a port it is 7700
``tcp://[fe80::1%eth0]``  IPv6 stands in brackets and keeps its scope
``tcp://:7700``          to listen: every interface, IPv4 and IPv6; port 0 takes a free one
``ws://host:80/p2pml``   a WebSocket; ``wss`` for one over TLS
``memory://a``           inside this process
``ble://p2pml-3f``       any other scheme: what stands before the first slash is the host, unread
=======================  ==========================================================================
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from p2pml.errors import AddressError

DEFAULT_PORTS = {"tcp": 7700, "ws": 80, "wss": 443}
"""The schemes whose host is a machine with a port, and the port when none is written."""

MAX_LENGTH = 512
"""Characters of an address; longer text (it may come from another peer) is refused unread."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.ASCII)
_SHAPE = re.compile(r"([^:/]*)://([^/]*)(.*)", re.DOTALL)
_HOST_PORT = re.compile(r"[^/\s:]+:\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """An address that was read; `str` gives the text back, ``Address.parse(str(address)) == address``.

    `host` has no brackets. It is empty for 'every interface'. `port` is None where the scheme has no ports.
    `path` is empty or starts with a slash.
    """

    scheme: str
    host: str
    port: int | None = None
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read an address. Raises `AddressError`, which names the text and what is wrong with it."""
        if len(text) > MAX_LENGTH:
            raise AddressError(f"{text[:40]!r}...: an address has at most {MAX_LENGTH} characters, not {len(text)}")
        if any(character.isspace() or not character.isprintable() for character in text):
            raise AddressError(f"{text!r}: spaces and control characters have no place in an address")
        shape = _SHAPE.fullmatch(text)
        if shape is None:
            hint = f"; did you mean 'tcp://{text}'?" if _HOST_PORT.fullmatch(text) or text.startswith("[") else ""
            raise AddressError(f"{text!r}: no scheme, such as 'tcp://'{hint}")
        scheme, place, path = shape[1].lower(), shape[2], shape[3]
        if not _SCHEME.fullmatch(scheme):
            raise AddressError(f"{text!r}: {shape[1]!r} is not a scheme")
        if not place:
            raise AddressError(f"{text!r}: nothing follows '{scheme}://'")
        if scheme not in DEFAULT_PORTS:
            return cls(scheme, place, None, path)
        if path and scheme == "tcp":
            raise AddressError(f"{text!r}: a tcp address has no path, so {path!r} is too much")
        try:
            host, port = split_host_port(place)
        except ValueError as fault:
            raise AddressError(f"{text!r}: {fault}") from None
        return cls(scheme, host, DEFAULT_PORTS[scheme] if port is None else port, path)

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere outside this machine."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.scheme == "memory" or (self.scheme in DEFAULT_PORTS and self.host.lower() == "localhost")

    def __str__(self) -> str:
        if self.port is None:
            return f"{self.scheme}://{self.host}{self.path}"
        return f"{self.scheme}://{join_host_port(self.host, self.port)}{self.path}"


def split_host_port(text: str) -> tuple[str, int | None]:
    """'host:port', '[IPv6]:port', ':port', or one without a port -> host without brackets, port or None.

    For transports of other schemes too. Raises `ValueError` that says what is wrong.
    """
    if text.startswith("["):
        inside, closed, after = text[1:].partition("]")
        if not closed:
            raise ValueError("the bracket is not closed")
        if after and not after.startswith(":"):
            raise ValueError(f"{after!r} follows the bracket, where only ':port' can")
        try:
            host = str(IPv6Address(inside))
        except ValueError:
            raise ValueError(f"{inside!r} is not an IPv6 address") from None
        colon, digits = after[:1], after[1:]
    else:
        host, colon, digits = text.partition(":")
        if ":" in digits:
            raise ValueError("an IPv6 address stands in brackets, like '[::1]:7700'")
        if set(host) & set("[]@?#%\\"):
            raise ValueError(f"{host!r} is not a host name")
        if host and re.fullmatch(r"[0-9.]+", host):
            try:
                host = str(IPv4Address(host))
            except ValueError:
                raise ValueError(f"{host!r} is not an IPv4 address") from None
    if not colon:
        return host, None
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 5 or int(digits) > 65535:
        raise ValueError(f"the port is {digits!r}, not a number from 0 to 65535")
    return host, int(digits)


def join_host_port(host: str, port: int) -> str:
    """The reverse of `split_host_port`: brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def end_address(scheme: str, name: object) -> Address | None:
    """The address of one end of a pipe, from its ``get_extra_info('peername')`` or ``('sockname')``.

    A socket's name is a tuple (host, port, and for IPv6 flow and scope); other transports give an address as text.
    None where the end is not known, as when the other side hung up at once.
    """
    if isinstance(name, str):
        return Address.parse(name)
    if not isinstance(name, tuple):
        return None
    host, port, *more = name
    if len(more) == 2 and more[1] and "%" not in host:
        host = f"{host}%{socket.if_indextoname(more[1])}"
    return Address(scheme, host, port)
