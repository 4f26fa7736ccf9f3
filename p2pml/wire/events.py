"""What a session tells its owner. Plain objects, in the order in which things happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2pml.errors import P2PMLError

if TYPE_CHECKING:
    from p2pml.wire.codec import Head
    from p2pml.wire.incoming import ReceiveChannel
    from p2pml.wire.outgoing import Outgoing


@dataclass(frozen=True, slots=True)
class Hello:
    """What the other side said of itself."""

    peer: str
    instance: str
    agent: str
    max_message: int
    codecs: tuple[str, ...]


@dataclass(slots=True)
class HelloReceived:
    """The other side introduced itself: answer with `Session.accept` or `Session.refuse`."""

    hello: Hello


@dataclass(slots=True)
class Opened:
    """The handshake is complete: messages may be sent."""

    hello: Hello


@dataclass(slots=True)
class ChannelsChanged:
    """The other side told its channels and its application's `meta`, in its HELLO or anew."""


class Arrived:
    """A whole message. Its credit is given back by `Receiver.consumed`. `peer` is for its taker's use.

    packed: for a compressed message, which is still to be unpacked (off the event loop), its head and payload.
    """

    __slots__ = ("channel", "charge", "inbox", "message", "packed", "peer", "reserved")

    def __init__(
        self,
        inbox: ReceiveChannel,
        message: Any,
        charge: int,
        reserved: int,
        packed: tuple[Head, list[memoryview]] | None,
    ) -> None:
        self.channel = inbox.name
        self.inbox = inbox
        self.message = message
        self.charge = charge
        self.reserved = reserved
        self.packed = packed
        self.peer: Any = None


@dataclass(slots=True)
class MessageDelivered:
    """The other side acknowledged this tracked message."""

    outgoing: Outgoing


@dataclass(slots=True)
class MessageFailed:
    """This message will not arrive."""

    outgoing: Outgoing
    error: P2PMLError


@dataclass(slots=True)
class MessageDiscarded:
    """A message from the other side was refused: what was wrong with it. Its sender is told."""

    channel: str
    error: P2PMLError


@dataclass(slots=True)
class CreditAvailable:
    """After a time without, the other side takes at least one more message on this channel."""

    channel: str


@dataclass(slots=True)
class Closed:
    """The session has ended; no event follows. `error` is what to raise where something waits."""

    error: P2PMLError
    orderly: bool
