"""Two sessions joined by a link in virtual time, and frames read back from bytes. No sockets."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import cbor2
import numpy as np

from p2pml.wire import codec, compression, events
from p2pml.wire.codec import Tensor, Tensors, message
from p2pml.wire.credits import MemoryBudget
from p2pml.wire.framing import HEADER, SIZE, FrameReader, FrameType, frame, preface
from p2pml.wire.hello import SessionOptions
from p2pml.wire.incoming import Incoming, Place, unpack
from p2pml.wire.options import ChannelOptions
from p2pml.wire.outgoing import Outgoing
from p2pml.wire.session import LIMITS, Session

E = TypeVar("E")
MEMORY = 1 << 26
PIPE = 1 << 19
"""Bytes under way in one direction before a sender has to wait, as with a socket's buffer."""


@message("test/wire/note")
class Note:
    number: int
    anything: Any = None


@message("test/wire/model")
class Model:
    number: int
    tensors: Tensors


@message("test/wire/strict")
class Strict:
    number: int
    values: Tensor

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("the number is negative")


def outgoing(content: Any, codec_name: str | None = None, **options: Any) -> Outgoing:
    """A message object, or bytes, ready for `Sender.send`."""
    if isinstance(content, (bytes, memoryview)):
        return Outgoing(b"", [memoryview(content)] if len(content) else [], **options)
    encoded = codec.encode(content)
    if codec_name is not None:
        packed = compression.wire_message(encoded, codec_name)
        if packed is not encoded:
            return Outgoing(packed.head, packed.segments, raw=encoded.size, **options)
    return Outgoing(encoded.head, encoded.segments, **options)


def model(number: int, *sizes: int) -> Model:
    """A message of tensors of these numbers of bytes, whose contents tell them from others."""
    return Model(
        number,
        {f"t{index}": np.full(size, (number + index) % 251, np.uint8) for index, size in enumerate(sizes)},
    )


def feed(session: Session, data: bytes | memoryview, now: float, sizes: Iterator[int]) -> None:
    """Put bytes into a session as a transport does, in pieces of at most the next of `sizes`."""
    view = memoryview(data)
    while view:
        buffer = session.get_buffer()
        assert len(buffer) > 0, "an empty buffer is fatal on every loop"
        count = min(len(buffer), len(view), next(sizes))
        buffer[:count] = view[:count]
        session.buffer_updated(count, now)
        view = view[count:]


class End:
    """A session with an application that reads all that comes, as long as it is `reading`."""

    def __init__(
        self,
        name: str,
        channels: Mapping[str, ChannelOptions],
        *,
        dialer: bool,
        now: float = 0.0,
        budget: MemoryBudget | None = None,
        place: Place | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self.budget = budget or MemoryBudget(MEMORY)
        settings = SessionOptions(peer=name, instance=f"{name}-1", **options)
        self.session = Session(settings, channels, self.budget, dialer=dialer, now=now, place=place)
        self.events: list[Any] = []
        self.arrived: list[events.Arrived] = []
        self.unread: deque[events.Arrived] = deque()
        self.sent: list[Outgoing] = []
        self.reading = True
        self.accepting = True

    def collect(self) -> None:
        """Take the session's events, and read."""
        while self.session.events:
            for event in self.session.take_events():
                self.events.append(event)
                if isinstance(event, events.HelloReceived) and self.accepting:
                    self.session.accept()
                elif isinstance(event, events.Arrived):
                    if event.packed is not None:
                        event.message = unpack(*event.packed)
                    self.arrived.append(event)
                    self.unread.append(event)
        if self.reading:
            self.read(len(self.unread))

    def read(self, count: int) -> None:
        """Take up to `count` messages, which gives their credit back."""
        for _ in range(min(count, len(self.unread))):
            self.session.receiver.consumed(self.unread.popleft())

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def messages(self, channel: str) -> list[Any]:
        """What arrived on a channel so far."""
        return [event.message for event in self.arrived if event.channel == channel]

    def send(self, channel: str, content: Any, codec_name: str | None = None, **options: Any) -> Outgoing:
        made = outgoing(content, codec_name, **options)
        self.session.sender.send(channel, made)
        return made

    def grown(self) -> int:
        """How much of the budget is taken beyond the windows."""
        return self.budget.used - self.budget.fixed

    @property
    def closed(self) -> events.Closed:
        (closed,) = self.of(events.Closed)
        assert self.events[-1] is closed, "no event follows"
        return closed


class Joined:
    """Two ends and the link between them: it takes `delay` seconds, and hands over pieces of `sizes`.

    Time passes in `run` only; `settle` moves bytes until both ends have nothing to say.
    """

    def __init__(self, left: End, right: End, *, delay: float = 0.001, sizes: Iterable[int] = (1 << 16,)) -> None:
        self.ends = (left, right)
        self.delay = delay
        self.now = 0.0
        self._sizes = itertools.cycle(sizes)
        self._pipes: tuple[deque[tuple[float, memoryview]], ...] = (deque(), deque())
        self.broken = [False, False]
        """Whether what the end of this index sends is lost: a half-open link."""

    def pull(self, index: int, *, once: bool = False) -> None:
        """Put what an end has to send into its pipe, as far as that has room; or only what comes at `once`."""
        pipe, end = self._pipes[index], self.ends[index]
        for _ in range(1 if once else PIPE):
            if sum(len(piece) for _, piece in pipe) >= PIPE:
                return
            wanted = end.session.wants_pull
            pieces = end.session.pull()
            assert wanted or not pieces
            end.collect()
            end.sent += end.session.take_sent()
            if not pieces:
                return
            if not self.broken[index]:
                pipe.extend((self.now + self.delay, memoryview(bytes(piece))) for piece in pieces)

    def deliver(self, index: int, until: float) -> bool:
        """Hand what an end sent, and what has been under way long enough, to the other; false if there was nothing."""
        pipe, other = self._pipes[index], self.ends[1 - index]
        found = False
        while pipe and pipe[0][0] <= until:
            found = True
            feed(other.session, pipe.popleft()[1], self.now, self._sizes)
            other.collect()
        return found

    def settle(self) -> Joined:
        """Move bytes until nothing is under way, and neither end has anything to send now."""
        for _ in range(100_000):
            for index in (0, 1):
                self.pull(index)
            self.now += self.delay
            delivered = [self.deliver(index, self.now) for index in (0, 1)]
            if not any(delivered):
                return self
        raise AssertionError("the two never come to rest")

    def tick(self) -> None:
        for end in self.ends:
            if end.session.deadline() <= self.now:
                end.session.tick(self.now)
                end.collect()

    def run(self, seconds: float, step: float = 0.01) -> Joined:
        """Let time pass, with both ends ticking when they are due."""
        stop = self.now + seconds
        while self.now < stop:
            for index in (0, 1):
                self.pull(index)
            self.now = min(stop, self.now + step)
            for index in (0, 1):
                self.deliver(index, self.now)
            self.tick()
        return self


def join(
    channels: Mapping[str, ChannelOptions] | None = None,
    others: Mapping[str, ChannelOptions] | None = None,
    *,
    sizes: Iterable[int] = (1 << 16,),
    delay: float = 0.001,
    left: Mapping[str, Any] | None = None,
    right: Mapping[str, Any] | None = None,
) -> tuple[Joined, End, End]:
    """Two open sessions: the left one dialed. `channels` are those of both, unless the right one has `others`."""
    mine = {"data": ChannelOptions()} if channels is None else channels
    one = End("left", mine, dialer=True, **(left or {}))
    two = End("right", mine if others is None else others, dialer=False, **(right or {}))
    joined = Joined(one, two, sizes=sizes, delay=delay).settle()
    return joined, one, two


class Frame(NamedTuple):
    """A frame as it was read."""

    kind: int
    flags: int
    channel: int
    sequence: int
    head: bytes
    payload: bytes


class Recorder:
    """Both handlers of a `FrameReader`; keeps what it is told as (preface) bytes and `Frame`s."""

    def __init__(self) -> None:
        self.seen: list[bytes | Frame] = []
        self.more = False
        self._started: tuple[int, int, int, bytes] | None = None
        self._target: Incoming | None = None
        self.direct: list[memoryview] = []

    def preface_received(self, data: bytes) -> None:
        self.seen.append(data)

    def control_received(self, kind: int, flags: int, channel: int, sequence: int, head: bytes, payload: bytes) -> None:
        self.seen.append(Frame(kind, flags, channel, sequence, head, payload))

    def data_received(self, flags: int, channel: int, sequence: int, head: memoryview, payload: memoryview) -> None:
        self.seen.append(Frame(1, flags, channel, sequence, bytes(head), bytes(payload)))

    def data_started(self, flags: int, channel: int, sequence: int, head: memoryview, length: int) -> Incoming:
        self._started = (flags, channel, sequence, bytes(head))
        self._target = Incoming(sequence, None, length, 0, offered=True)
        self._target.take_memory()
        return self._target

    def data_finished(self) -> bool:
        assert self._target is not None
        assert self._started is not None
        assert self._target.remaining == 0
        flags, channel, sequence, head = self._started
        self.direct += self._target.buffers
        self.seen.append(Frame(1, flags, channel, sequence, head, bytes(self._target.message())))
        self._target = None
        return self.more


def read_frames(data: bytes, *, preface: bool = False) -> list[Frame]:
    """The frames that bytes consist of; with their preface or without."""
    recorder = Recorder()
    reader = FrameReader(recorder, recorder)
    view = memoryview(data if preface else _PREFACE + data)
    while view:
        buffer = reader.get_buffer()
        count = min(len(buffer), len(view))
        buffer[:count] = view[:count]
        reader.buffer_updated(count)
        view = view[count:]
    assert not reader.midway
    return [item for item in recorder.seen if isinstance(item, Frame)]


_PREFACE = preface()

HELLO: dict[str, Any] = {
    "peer": "stranger", "instance": "s1", "agent": "hand-made", "max_message": 1 << 32, "codecs": ["lz4", "zstd"],
    "link": 1 << 20, "channels": [], "meta": {},
}  # fmt: skip


class Stranger:
    """The other side of a session, by hand: writes any bytes, reads frames. It dialed."""

    def __init__(
        self,
        channels: Mapping[str, ChannelOptions] | None = None,
        *,
        open: bool = True,
        hello: Any = None,
        **options: Any,
    ) -> None:
        mine = {"data": ChannelOptions()} if channels is None else channels
        self.end = End("victim", mine, dialer=False, **options)
        self.session = self.end.session
        self.now = 0.0
        self._read = False
        if open:
            self.write(preface(), frame(10, head=codec.plain_dumps({**HELLO, **(hello or {})})), frame(6))
            assert self.session.is_open, self.end.events
            self.read()

    def write(self, *pieces: bytes, sizes: Iterable[int] = (1 << 16,)) -> None:
        turns = itertools.cycle(sizes)
        for piece in pieces:
            feed(self.session, piece, self.now, turns)
            self.end.collect()

    def read(self) -> list[Frame]:
        """The frames that the session has to send now."""
        content = b"".join(iter(lambda: b"".join(self.session.pull()), b""))
        first, self._read = not self._read, True
        return read_frames(content, preface=first)

    @property
    def error(self) -> str:
        """Why the session was closed."""
        assert self.session.is_closed
        return str(self.end.closed.error)


def data(channel: int, sequence: int, payload: bytes = b"", head: bytes = b"", flags: int = 3) -> bytes:
    """A DATA frame."""
    return HEADER.pack(1, flags, len(head), channel, len(payload), sequence & 0xFFFFFFFF) + head + payload


def offer(sequence: int, size: int, head: bytes = b"", channel: int = 1) -> bytes:
    """An OFFER frame of a message with `size` bytes of payload."""
    return frame(FrameType.OFFER, 0, channel, sequence, head, SIZE.pack(size))


def credit(*entries: tuple[int, int, int, int]) -> bytes:
    """A CREDIT frame."""
    return frame(FrameType.CREDIT, payload=b"".join(LIMITS.pack(*entry) for entry in entries))


def hello(**changes: Any) -> bytes:
    """A HELLO frame, with other fields than `HELLO`; those given as ... are left out."""
    about = {name: value for name, value in {**HELLO, **changes}.items() if value is not ...}
    return frame(FrameType.HELLO, head=cbor2.dumps(about))
