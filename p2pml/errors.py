"""Every error that p2pml raises, in classes chosen by what the caller should do about it.

==================  ==========================================================================
`AddressError`      mend the address
`TransportError`    the address is well-formed but could not be used now: retry, or look at the machine
`HandshakeRefused`  the other side said no, or speaks another version: retrying as you are is useless
`LinkClosed`        the link went away: the node reconnects if it was told to keep it
`ProtocolError`     the other side broke the wire protocol: the link is closed, the node goes on
`MessageError`      this message cannot be encoded, decoded or accepted: mend the message
`SendTimeout`       the receiver granted no credit in time: it is slow, or has no such channel
`MachineFailed`     a state machine's handler or computation raised
`MissingExtra`      install the named extra
==================  ==========================================================================
"""

from __future__ import annotations


class P2PMLError(Exception):
    """Root of all errors of this package."""


class AddressError(P2PMLError, ValueError):
    """An address does not parse, or names a transport that is not installed."""


class TransportError(P2PMLError, OSError):
    """Dialing or listening failed; the message names the address and the cause."""


class AddressInUse(TransportError):
    """The address to listen on is taken."""


class LinkClosed(P2PMLError, ConnectionError):
    """The link to a peer is closed; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class HandshakeRefused(LinkClosed):
    """The peer refused the handshake, or the versions have nothing in common. Don't retry unchanged.

    `retryable` is true where waiting may help (a peer id still held by a link that is being given up).
    """

    def __init__(self, reason: str, *, retryable: bool = False) -> None:
        super().__init__(reason)
        self.retryable = retryable


class DuplicateLink(HandshakeRefused):
    """There is a link to this `peer` already, and that one stays: use it."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"a link to {peer} stands already", retryable=True)
        self.peer = peer


class ProtocolError(P2PMLError):
    """The peer sent something that the wire protocol forbids; the message names what and where."""


class MessageError(P2PMLError, ValueError):
    """A message cannot be encoded, decoded or accepted; the message names the kind and the field."""


class MessageTooLarge(MessageError):
    """A message is larger than the receiver's stated limit (found before anything is sent)."""


class MessageRefused(MessageError):
    """The receiver refused this message; the link goes on."""


class CompressionError(MessageError):
    """A compressed payload lies about its size, is damaged, or uses an unknown codec."""


class UnknownChannel(P2PMLError, LookupError):
    """A channel that this node has not opened is used for receiving."""


class SendTimeout(P2PMLError, TimeoutError):
    """No credit arrived in time; nothing of the message was sent."""


class MachineFailed(P2PMLError):
    """A state machine stopped because a handler or a computation raised.

    `peer` is the id of the peer where it happened, `trace` the formatted traceback from there.
    """

    def __init__(self, message: str, *, peer: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.peer = peer
        self.trace = trace


class MissingExtra(P2PMLError, ImportError):
    """An optional dependency is missing; the message is the command that installs it."""

    @classmethod
    def of(cls, package: str, extra: str, purpose: str) -> MissingExtra:
        """The error for `package`, needed for `purpose`, which `pip install 'p2pml[extra]'` brings."""
        return cls(f"{purpose} needs {package}, which is not installed: pip install 'p2pml[{extra}]'")
