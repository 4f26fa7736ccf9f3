"""What the two sides of a link tell each other of themselves: the maps in HELLO and CHANNELS frames. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from p2pml.errors import HandshakeRefused, MessageTooLarge, P2PMLError, ProtocolError
from p2pml.wire import codec
from p2pml.wire.events import Hello
from p2pml.wire.framing import MAX_HEAD, VERSIONS
from p2pml.wire.sender import MAX_NAME


@dataclass(slots=True)
class SessionOptions:
    """How a node's links behave; all times in seconds, sizes in bytes.

    heartbeat: a ping goes out this often. timeout: with nothing at all received for this long, the peer is gone.
    handshake: a link that is not open by then is closed. max_message: the largest message accepted, uncompressed.
    """

    peer: str
    instance: str
    agent: str = "p2pml"
    heartbeat: float = 2.5
    timeout: float = 10.0
    handshake: float = 10.0
    max_message: int = 1 << 32
    codecs: tuple[str, ...] = ("lz4", "zstd")
    versions: tuple[int, int] = VERSIONS
    meta: dict[str, Any] = field(default_factory=dict)


def hello_head(options: SessionOptions, link_limit: int, channels: list[Any]) -> bytes:
    """The head of a HELLO. Raises `HandshakeRefused` if there is more to tell than one frame holds."""
    about = {
        "peer": options.peer,
        "instance": options.instance,
        "agent": options.agent,
        "max_message": options.max_message,
        "codecs": list(options.codecs),
        "link": link_limit,
        "channels": channels,
        "meta": options.meta,
    }
    head = codec.plain_dumps(about)
    if len(head) > MAX_HEAD:
        raise HandshakeRefused(f"a node's channels and meta take {len(head)} bytes (at most {MAX_HEAD})")
    return head


def channels_head(options: SessionOptions, channels: list[Any]) -> bytes:
    """The head of a CHANNELS frame. Raises `MessageTooLarge`."""
    head = codec.plain_dumps({"channels": channels, "meta": options.meta})
    if len(head) > MAX_HEAD:
        raise MessageTooLarge(f"channels and meta take {len(head)} bytes (at most {MAX_HEAD})")
    return head


def read_map(head: bytes, what: str) -> dict[str, Any]:
    """The map in the head of a frame. Raises `ProtocolError`."""
    try:
        return codec.plain_loads(head, what)
    except P2PMLError as error:
        raise ProtocolError(str(error)) from None


def read_hello(about: Mapping[str, Any]) -> tuple[Hello, int]:
    """Who the other side is, and how many bytes it takes on the link. Raises `ProtocolError`."""
    peer, instance, agent = (_field(about, name, str) for name in ("peer", "instance", "agent"))
    if not all(0 < len(text) <= MAX_NAME and text.isprintable() for text in (peer, instance, agent)):
        raise ProtocolError("a HELLO with an empty, overlong or unprintable peer id, instance or agent")
    codecs = tuple(name for name in _field(about, "codecs", list) if isinstance(name, str))
    return Hello(peer, instance, agent, _field(about, "max_message", int), codecs), _field(about, "link", int)


def read_channels(about: Mapping[str, Any]) -> Iterator[tuple[int, str, int, int, int]]:
    """Its channels: number, name, message limit, byte limit, eager size. Raises `ProtocolError`."""
    for item in _field(about, "channels", list):
        if not isinstance(item, list) or [type(part) for part in item] != [int, str, int, int, int]:
            raise ProtocolError("a malformed list of channels")
        number, name, messages, size, eager = item
        if not 0 < number < 1 << 32 or min(messages, size, eager) < 0:
            raise ProtocolError(f"channel '{name}' has impossible limits")
        yield number, name, messages, size, eager


def read_meta(about: Mapping[str, Any]) -> dict[str, Any]:
    """What its application tells. Raises `ProtocolError`."""
    meta: dict[str, Any] = _field(about, "meta", dict)
    return meta


def _field(about: Mapping[str, Any], name: str, kind: type) -> Any:
    value = about.get(name)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ProtocolError(f"a handshake without a proper '{name}'")
    return value
