"""The asyncio side of p2pml: a `Node` listens, dials, and exchanges messages with its `Peer`s on named channels.

::

    async with Node("alice", listen=["tcp://0.0.0.0:7700"]) as node:
        inbox = node.open("tensors")
        peer = await node.dial("tcp://10.0.0.2:7700")
        await peer.send("tensors", Gradient(round=1, values=array))
        sender, message = await inbox.receive()

Everything runs on one event loop. A node owns its listeners, links and tasks: leaving the ``async with`` block closes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any

from p2pml.address import Address
from p2pml.errors import (
    DuplicateLink,
    HandshakeRefused,
    LinkClosed,
    P2PMLError,
    SendTimeout,
    TransportError,
    UnknownChannel,
)
from p2pml.link import Link, Ticket
from p2pml.transport import Listener, transport_for
from p2pml.wire import codec, events
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.options import ChannelOptions
from p2pml.wire.session import Session, SessionOptions

logger = logging.getLogger("p2pml")

MAX_PENDING = 64
"""Incoming connections that have not completed their handshake; further ones are dropped."""
FIRST_DELAY = 0.1
LAST_DELAY = 10.0
"""Bounds of the back-off between attempts to reconnect, in seconds; the actual delay is random below it (full jitter)."""


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
        self._arrived: deque[tuple[Peer, events.Arrived]] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._closed: P2PMLError | None = None

    def __len__(self) -> int:
        return len(self._arrived)

    def _put(self, peer: Peer, arrived: events.Arrived) -> None:
        self._arrived.append((peer, arrived))
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
        peer, arrived = self._arrived.popleft()
        peer.link.consumed(arrived)
        return peer, arrived.message

    async def receive(self, timeout: float | None = None) -> tuple[Peer, Any]:
        """The next message and its sender; a message sent as bytes arrives as bytes.

        Raises `TimeoutError` after `timeout` seconds, `LinkClosed` when the node closes. A cancelled receive loses nothing.
        """
        while not self._arrived:
            if self._closed is not None:
                raise self._closed
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            try:
                async with asyncio.timeout(timeout):
                    await future
            except BaseException:
                if future.done() and not future.cancelled() and self._arrived:
                    self._wake()
                raise
        item = self.receive_nowait()
        assert item is not None
        return item

    async def __aiter__(self) -> AsyncIterator[tuple[Peer, Any]]:
        with contextlib.suppress(LinkClosed):
            while True:
                yield await self.receive()

    def _close(self, error: P2PMLError) -> None:
        self._closed = error
        while self._waiting:
            self._wake()


class Peer:
    """Another node, as long as one link to it stands. After a reconnect it is a new object."""

    def __init__(self, node: Node, link: Link, hello: events.Hello) -> None:
        self.node = node
        self.link = link
        self.id = hello.peer
        self.hello = hello

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
        `delivered`, when the peer acknowledged the whole message. Cancelled before that, the message is taken back, or
        delivered if all of it had been handed out.

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
            link.take_back(ticket)
            if isinstance(error, TimeoutError) and clock.expired():
                raise SendTimeout(self._why_not(channel, timeout or 0.0)) from error
            raise

    def _why_not(self, channel: str, timeout: float) -> str:
        outlet = self.link.session.sender.channel(channel)
        if outlet is None or not outlet.id:
            has = ", ".join(self.channels) or "none"
            return f"{self.id} has not opened a channel '{channel}' within {timeout:g} s (it has: {has})"
        return f"{self.id} granted no credit on '{channel}' within {timeout:g} s ({len(outlet.queue)} messages wait)"

    def try_send(self, channel: str, message: Any) -> bool:
        """Send a message if the peer has credit for it now; false if not. Its tensors must not change until the link is idle."""
        link = self.link
        if isinstance(message, (bytes, bytearray, memoryview)):
            size = memoryview(message).nbytes
        else:
            message = codec.encode(message)
            size = message.size
        if link.send_now(channel, message):
            return True
        if not link.session.sender.can_send(channel, size):
            return False
        link.submit(channel, message)
        return True

    @property
    def channels(self) -> list[str]:
        """The channels that the peer has opened."""
        return self.link.session.sender.names

    async def close(self, reason: str = "closed") -> None:
        """Close the link in order, and don't keep it any more."""
        self.node._unkeep(self.id)
        self.link.close(reason)
        await asyncio.shield(self.link.finished)


Watcher = Callable[[str, Peer, Any], None]
"""Called as ``watcher(what, peer, detail)``: 'joined' (None), 'left' (the reason), 'changed' (None), 'credit' (the channel)."""


class Node:
    """One peer of a group: an identity, its listeners, and its links.

    name: the peer id; by default a random one. Ids must differ within a group.
    listen: addresses to listen on.
    memory: bytes that all links together may hold of what they have received and nobody has taken.
    heartbeat, timeout: seconds between pings, and without any sign of life before a peer is given up.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        listen: Iterable[str] = (),
        memory: int = 1 << 30,
        max_message: int = 1 << 32,
        heartbeat: float = 2.5,
        timeout: float = 10.0,
        handshake: float = 10.0,
    ) -> None:
        self.id = name or secrets.token_hex(8)
        self.instance = secrets.token_hex(8)
        self.budget = MemoryBudget(memory)
        self.peers: dict[str, Peer] = {}
        self._listen = [Address.parse(text) for text in listen]
        self._session_options = SessionOptions(
            peer=self.id,
            instance=self.instance,
            heartbeat=heartbeat,
            timeout=timeout,
            handshake=handshake,
            max_message=max_message,
        )
        self._channels: dict[str, ChannelOptions] = {}
        self._preferences: dict[str, ChannelOptions] = {}
        self._inboxes: dict[str, Inbox] = {}
        self.sinks: dict[str, Callable[[Any, events.Arrived], None]] = {}
        self._placers: dict[str, Callable[[str, codec.Head], Any]] = {}
        self._listeners: list[Listener] = []
        self._links: set[Link] = set()
        self._accepted: dict[str, Link] = {}
        self._dials: dict[Link, asyncio.Future[Peer]] = {}
        self._watchers: list[Watcher] = []
        self._kept: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._closing = False
        self._random = random.Random(self.instance)

    # ------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Node:
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        try:
            for address in self._listen:
                await self.listen(str(address))
        except BaseException:
            await self._shut_down(0.0)
            await self._tasks.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        assert self._tasks is not None
        try:
            await self._shut_down(5.0)
        finally:
            # Not given the error of the block: it would come out wrapped in a group. The tasks end without errors of their own.
            await self._tasks.__aexit__(None, None, None)

    async def _shut_down(self, patience: float) -> None:
        self._closing = True
        for listener in self._listeners:
            await listener.close()
        for task in self._background:
            task.cancel()
        links = list(self._links)
        for link in links:
            link.close("the node shuts down")
        for inbox in self._inboxes.values():
            inbox._close(LinkClosed("the node is closed"))
        if links:
            _, late = await asyncio.wait([link.finished for link in links], timeout=patience)
            for link in links:
                link.abort("the node shuts down")
            if late:
                await asyncio.wait(late, timeout=1.0)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a task that ends, at the latest, with the node."""
        if self._tasks is None or self._closing:
            work.close()
            raise LinkClosed("the node is not running")
        task = self._tasks.create_task(_guard(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def listen(self, address: str) -> list[str]:
        """Listen on one more address; returns where it can be dialed. Raises `AddressError`, `TransportError`."""
        where = Address.parse(address)
        listener = await transport_for(where).listen(where, self._accept)
        self._listeners.append(listener)
        return [str(found) for found in listener.addresses]

    @property
    def addresses(self) -> list[str]:
        """Where this node can be dialed."""
        return [str(address) for listener in self._listeners for address in listener.addresses]

    # --------------------------------------------------------------------------------------------- channels

    def open(
        self,
        channel: str,
        options: ChannelOptions | None = None,
        *,
        handler: Callable[[Peer, events.Arrived], None] | None = None,
        place: Callable[[str, codec.Head], Any] | None = None,
    ) -> Inbox:
        """Open a channel for receiving, on all links, now and later. Peers can send on it as soon as they hear of it.

        With a `handler`, messages go to ``handler(peer, arrived)``, which must see to it that ``peer.link.consumed(arrived)`` is
        called, and not into the inbox. `place` says where large messages go (see `p2pml.statemachine.place`).
        """
        if channel in self._channels:
            raise ValueError(f"channel '{channel}' is open already")
        self._channels[channel] = options or ChannelOptions()
        self._preferences.setdefault(channel, self._channels[channel])
        inbox = self._inboxes[channel] = Inbox(channel)
        self.sinks[channel] = inbox._put if handler is None else handler
        if place is not None:
            self._placers[channel] = place
        for link in self._links:
            if not link.session.is_closed:
                link.session.add_channel(channel, self._channels[channel])
                link.kick()
        return inbox

    def prefer(self, channel: str, options: ChannelOptions) -> None:
        """How this node sends on a channel of this name that it has not opened itself: priority, weight, compression."""
        self._preferences[channel] = options
        for link in self._links:
            link.session.sender.prefer(channel, options)

    def close_channel(self, channel: str) -> None:
        """Take what still comes on a channel, and drop it. The name stays taken for the life of the node's links."""
        self.sinks[channel] = lambda peer, arrived: peer.link.consumed(arrived)
        self._placers.pop(channel, None)

    def channel(self, name: str) -> Inbox:
        """The inbox of an open channel. Raises `UnknownChannel`."""
        try:
            return self._inboxes[name]
        except KeyError:
            raise UnknownChannel(
                f"no channel '{name}' is open here (open: {', '.join(self._channels) or 'none'})"
            ) from None

    def announce(self, key: str, value: Any) -> None:
        """Tell all peers, now and later, a small CBOR-able fact about this node; None takes it back."""
        if value is None:
            self._session_options.meta.pop(key, None)
        else:
            self._session_options.meta[key] = value
        for link in self._links:
            link.session.announce()
            link.kick()

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Have `watcher` called for what happens to peers; returns a function that ends it."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def _tell(self, what: str, peer: Peer, detail: Any = None) -> None:
        for watcher in list(self._watchers):
            watcher(what, peer, detail)

    # ---------------------------------------------------------------------------------------------- dialing

    async def dial(self, address: str, *, timeout: float = 10.0, keep: bool = False) -> Peer:
        """Connect to the node at `address`; if a link to it stands already, that is it.

        With `keep`, a link that is lost is dialed again, with growing random pauses, until the node or the peer is closed on
        this side. Raises `AddressError`, `TransportError`, `HandshakeRefused`, `LinkClosed`.
        """
        where = Address.parse(address)
        clock = asyncio.timeout(timeout)
        try:
            async with clock:
                try:
                    peer = await self._dial_once(where)
                except DuplicateLink as duplicate:
                    peer = await self._joined(duplicate.peer)
        except TimeoutError as error:
            if clock.expired():
                raise TransportError(f"{address}: no answer within {timeout:g} s") from error
            raise
        if keep and peer.id not in self._kept:
            self._kept[peer.id] = self.spawn(self._keep(peer, where, timeout))
        return peer

    async def _dial_once(self, where: Address) -> Peer:
        if self._tasks is None or self._closing:
            raise LinkClosed("the node is not running")
        made = await transport_for(where).dial(where, lambda: self._link(dialer=True))
        assert isinstance(made, Link)
        future: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self._dials[made] = future
        try:
            if made.session.is_open:
                return self.peers[made.session.peer]
            if made.error is not None:
                raise made.error
            return await future
        except BaseException:
            if not made.session.is_open:
                made.abort("the dial was given up")
            raise
        finally:
            self._dials.pop(made, None)

    async def _joined(self, peer_id: str) -> Peer:
        """The peer of this id, once its link is open."""
        joined = asyncio.Event()
        end = self.watch(lambda what, peer, detail: joined.set() if peer.id == peer_id else None)
        try:
            while peer_id not in self.peers:
                joined.clear()
                await joined.wait()
        finally:
            end()
        return self.peers[peer_id]

    async def _keep(self, peer: Peer, where: Address, timeout: float) -> None:
        """Dial a peer again whenever its link is lost."""
        while True:
            await asyncio.shield(peer.link.finished)
            delay = FIRST_DELAY
            while True:
                await asyncio.sleep(self._random.uniform(0, delay))
                delay = min(LAST_DELAY, delay * 2)
                try:
                    async with asyncio.timeout(timeout):
                        peer = self.peers.get(peer.id) or await self._dial_once(where)
                    break
                except HandshakeRefused as error:
                    if not error.retryable:
                        logger.warning("%s is not dialed again: %s", where, error)
                        return
                except (P2PMLError, TimeoutError) as error:
                    logger.info("%s: %s; trying again", where, error)

    def _unkeep(self, peer: str) -> None:
        task = self._kept.pop(peer, None)
        if task is not None:
            task.cancel()

    # ------------------------------------------------------------------------------------------------ links

    def _link(self, *, dialer: bool) -> Link:
        def make(now: float) -> Session:
            return Session(
                self._session_options,
                self._channels,
                self.budget,
                dialer=dialer,
                now=now,
                place=self._placer(lambda: link),
            )

        link = Link(self, make, asyncio.get_running_loop())
        link.options = self._preferences
        for channel, preferred in self._preferences.items():
            link.session.sender.prefer(channel, preferred)
        self._links.add(link)
        link.finished.add_done_callback(lambda _: self._links.discard(link))
        return link

    def _placer(self, link: Callable[[], Link]) -> Callable[[str, codec.Head], Any]:
        def place(channel: str, head: codec.Head) -> Any:
            placer = self._placers.get(channel)
            return None if placer is None else placer(link().session.peer, head)

        return place

    def _accept(self) -> Link:
        link = self._link(dialer=False)
        pending = sum(1 for other in self._links if other.session.hello is None and not other.session.dialer)
        if self._closing or pending > MAX_PENDING:
            link.session.lost(LinkClosed("too many connections without a handshake"))
        return link

    def said_hello(self, link: Link, hello: events.Hello) -> None:
        """Decide whether a link is wanted. Of two nodes that dial each other at once, the lower id's dial stays."""
        session = link.session
        if hello.instance == self.instance:
            session.refuse("this node dialed itself")
            return
        if hello.peer == self.id:
            session.refuse(f"peer id '{hello.peer}' is in use (it is this node's)")
            return
        other = self._accepted.get(hello.peer)
        if other is not None and not other.session.is_closed:
            same = other.session.hello is not None and other.session.hello.instance == hello.instance
            if not same:
                session.refuse(f"peer id '{hello.peer}' is in use", retry=True)
                return
            mine_wins = self.id < hello.peer
            if other.session.is_open or session.dialer == other.session.dialer or session.dialer != mine_wins:
                session.refuse_duplicate()
                return
            self._accepted[hello.peer] = link
            other.drop_duplicate()
        self._accepted[hello.peer] = link
        session.accept()

    def opened(self, link: Link) -> None:
        assert link.session.hello is not None
        peer = link.peer = Peer(self, link, link.session.hello)
        self.peers[peer.id] = peer
        future = self._dials.get(link)
        if future is not None and not future.done():
            future.set_result(peer)
        self._tell("joined", peer)

    def channels_changed(self, link: Link) -> None:
        if link.peer is not None:
            self._tell("changed", link.peer)

    def credit_available(self, link: Link, channel: str) -> None:
        if link.peer is not None:
            self._tell("credit", link.peer, channel)

    def closed(self, link: Link, error: P2PMLError, orderly: bool) -> None:
        future = self._dials.get(link)
        if future is not None and not future.done():
            future.set_exception(error)
        hello = link.session.hello
        if hello is None:
            if not isinstance(error, LinkClosed):
                logger.warning("a connection was dropped: %s", error)
            return
        if self._accepted.get(hello.peer) is link:
            del self._accepted[hello.peer]
        peer = self.peers.get(hello.peer)
        if peer is not None and peer.link is link:
            del self.peers[hello.peer]
            self._tell("left", peer, str(error))


async def _guard(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Exception:
        logger.exception("a background task of a node failed")
