"""What a program holds of another node: a `Peer` to send to, and an `Inbox` for each channel to receive from."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from p2pml.errors import LinkClosed, P2PMLError, SendTimeout
from p2pml.link import Link, Ticket, as_encoded
from p2pml.wire import events


class _Waiter(Ticket):
    """Wakes the task that awaits a `Peer.send`."""

    __slots__ = ("future", "until_delivered")

    def __init__(self, future: asyncio.Future[None], until_delivered: bool) -> None:
        self.future = future
        self.until_delivered = until_delivered

    def sent(self) -> None:
        if not self.until_delivered and not self.future.done():
            self.future.set_result(None)

    def delivered(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def failed(self, error: P2PMLError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class Inbox:
    """What arrives on one channel from all peers, in order for each peer.

    It is bounded by the credits: a message's credit goes back to its sender when it is taken out of here.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._arrived: deque[events.Arrived] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._arrived)

    def _put(self, peer: Peer, arrived: events.Arrived) -> None:
        arrived.peer = peer
        self._arrived.append(arrived)
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                return

    def receive_nowait(self) -> tuple[Peer, Any] | None:
        """The next message and its sender, or None."""
        if not self._arrived:
            return None
        arrived = self._arrived.popleft()
        peer: Peer = arrived.peer
        peer.link.consumed(arrived)
        return peer, arrived.message

    async def receive(self, timeout: float | None = None) -> tuple[Peer, Any]:
        """The next message and its sender; a message sent as bytes arrives as bytes.

        Raises `TimeoutError` after `timeout` seconds, `LinkClosed` when the node closes. A cancelled receive loses nothing.
        """
        if not self._arrived:
            if timeout is None:
                while not self._arrived:
                    await self._wait()
            else:
                async with asyncio.timeout(timeout):
                    while not self._arrived:
                        await self._wait()
        arrived = self._arrived.popleft()
        peer: Peer = arrived.peer
        peer.link.consumed(arrived)
        return peer, arrived.message

    async def _wait(self) -> None:
        if self._closed:
            raise LinkClosed("the node is closed")
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except BaseException:
            if future in self._waiting:
                self._waiting.remove(future)
            elif self._arrived:  # woken and cancelled in one turn of the loop: the message is for the next in line
                self._wake()
            raise

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> tuple[Peer, Any]:
        try:
            return await self.receive()
        except LinkClosed:
            raise StopAsyncIteration from None

    def _close(self) -> None:
        self._closed = True
        while self._waiting:
            self._wake()


class Keeper(Protocol):
    """Who dials a peer again when its link is lost: the node."""

    def unkeep(self, peer: str) -> None:
        """Don't dial it any more."""


class Peer:
    """Another node, as long as one link to it stands. After a reconnect it is a new object."""

    def __init__(self, node: Keeper, link: Link, hello: events.Hello) -> None:
        self.node = node
        self.link = link
        self.id = hello.peer
        self.hello = hello
        self.dropped = False
        """Whether this side closed it, so that its link is not kept."""

    def __repr__(self) -> str:
        return f"<Peer {self.id}{' (closed)' if self.link.session.is_closed else ''}>"

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the peer's node announced (`Node.announce`)."""
        return self.link.session.meta

    @property
    def bytes_per_second(self) -> float | None:
        """What the link to this peer carried while it was busy; None until it carried something."""
        return self.link.session.meter.bytes_per_second

    @property
    def round_trip(self) -> float | None:
        """Seconds to the peer and back, from heartbeats; None until the first came back."""
        return self.link.session.meter.round_trip

    async def send(self, channel: str, message: Any, *, timeout: float | None = None, delivered: bool = False) -> None:
        """Send a message (an object of a `message` class, or bytes), waiting for credit as long as it takes.

        It returns when every byte was handed to the operating system, and from then on the tensors may be changed; with
        `delivered`, when the peer acknowledged the whole message. Cancelled or timed out before that, the message is taken
        back; only if all of it had been handed out already, it may still arrive.

        Raises `MessageError` (the message, or its refusal by the peer), `LinkClosed`, and `SendTimeout` after `timeout` seconds.
        """
        link = self.link
        if not delivered and link.send_now(channel, message):
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = _Waiter(future, delivered)
        link.submit(channel, message, ticket, tracked=delivered)
        if future.done():
            return future.result()
        clock = asyncio.timeout(timeout)
        try:
            async with clock:
                await future
        except BaseException as error:
            done = retrieve(future)
            taken_back = link.take_back(ticket)
            if isinstance(error, TimeoutError) and clock.expired():
                if done:
                    return future.result()
                raise SendTimeout(self._why_not(channel, timeout or 0.0, taken_back)) from error
            raise

    def _why_not(self, channel: str, timeout: float, taken_back: bool) -> str:
        outlet = self.link.session.sender.channel(channel)
        if outlet is None or not outlet.id:
            has = ", ".join(self.channels) or "none"
            return f"{self.id} has not opened a channel '{channel}' within {timeout:g} s (it has: {has})"
        if not taken_back:
            return f"{self.id} has not acknowledged a message on '{channel}' within {timeout:g} s (it may yet arrive)"
        waiting = self.link.waiting(channel)
        return f"{self.id} granted no credit on '{channel}', or took too long, within {timeout:g} s ({waiting} messages wait)"

    def try_send(self, channel: str, message: Any) -> bool:
        """Send a message if the peer has credit for it now; false if not. Its tensors must not change until the link is idle."""
        link = self.link
        encoded = as_encoded(message)
        if link.send_now(channel, encoded):
            return True
        if not link.can_send(channel, encoded.size):
            return False
        link.submit(channel, encoded)
        return True

    @property
    def channels(self) -> list[str]:
        """The channels that the peer has opened."""
        return self.link.session.sender.names

    def drop(self, reason: str = "closed") -> None:
        """Close the link in order without waiting for it, and don't keep it any more."""
        self.dropped = True
        self.node.unkeep(self.id)
        self.link.close(reason)

    async def close(self, reason: str = "closed") -> None:
        """`drop` it, and wait until the connection is gone, at most two seconds."""
        self.drop(reason)
        await asyncio.shield(self.link.finished)


Watcher = Callable[[str, Peer, Any], None]
"""Called as ``watcher(what, peer, detail)``: 'joined' (None), 'left' (the reason), 'changed' (None), 'credit' (the channel)."""


def retrieve(future: asyncio.Future[Any]) -> bool:
    """Whether a future has come to an end of its own; its error, if nobody is there to raise it, is then not complained of."""
    done = future.done() and not future.cancelled()
    if done:
        future.exception()
    return done
