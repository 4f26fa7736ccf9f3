"""Frames from bytes, at every split; and what a reader refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.errors import HandshakeRefused, ProtocolError
from p2pml.wire.framing import (
    BETWEEN_FRAMES,
    DIRECT,
    HEADER,
    MAX_CONTROL,
    MAX_HEAD,
    MAX_PAYLOAD,
    MIN_SLICE,
    STAGING,
    VERSIONS,
    FrameReader,
    FrameType,
    frame,
    preface,
    read_preface,
    slice_for,
)
from tests.unit.wire.joined import Frame, Recorder, data

TLS_HELLO = bytes.fromhex("16030100f1010000ed0303") + bytes(range(40))
CONTROL = [kind for kind in FrameType if kind is not FrameType.DATA]


def fill(reader: FrameReader, content: bytes, sizes: Iterator[int] | None = None) -> None:
    view = memoryview(content)
    while view:
        buffer = reader.get_buffer()
        assert len(buffer) > 0
        count = min(len(buffer), len(view), next(sizes) if sizes is not None else len(view))
        buffer[:count] = view[:count]
        reader.buffer_updated(count)
        view = view[count:]


def made() -> tuple[FrameReader, Recorder]:
    recorder = Recorder()
    return FrameReader(recorder, recorder), recorder


def started() -> tuple[FrameReader, Recorder]:
    reader, recorder = made()
    fill(reader, preface())
    recorder.seen.clear()
    return reader, recorder


numbers = st.integers(0, (1 << 32) - 1)


def frames() -> st.SearchStrategy[Frame]:
    sizes = st.one_of(st.integers(0, 40), st.sampled_from([DIRECT - 1, DIRECT, STAGING - 16, STAGING, 150_000]))
    heads = st.one_of(st.binary(max_size=30), st.sampled_from([bytes(MAX_HEAD)]))
    payloads = sizes.map(lambda size: np.random.default_rng(size).bytes(size))
    flags = st.integers(0, 255)
    of_data = st.builds(Frame, st.just(1), flags, numbers, numbers, heads, payloads)
    small = st.one_of(st.binary(max_size=30), st.sampled_from([bytes(range(256)) * (MAX_CONTROL // 256)]))
    return st.one_of(
        of_data, st.builds(Frame, st.sampled_from(CONTROL).map(int), flags, numbers, numbers, heads, small)
    )


@given(st.lists(frames(), max_size=8), st.lists(st.integers(1, 100_000), min_size=1, max_size=5), st.booleans())
def test_any_frames_at_any_split_are_read_as_they_were_written(
    sent: list[Frame], sizes: list[int], more_follows: bool
) -> None:
    reader, recorder = made()
    recorder.more = more_follows
    content = preface() + b"".join(
        HEADER.pack(one.kind, one.flags, len(one.head), one.channel, len(one.payload), one.sequence)
        + one.head
        + one.payload
        for one in sent
    )
    fill(reader, content, (sizes[index % len(sizes)] for index in range(len(content))))
    assert recorder.seen == [preface(), *sent]
    assert not reader.midway


def test_every_single_split_gives_the_same() -> None:
    sent = [
        Frame(1, 3, 1, 0, b"head", b"payload"),
        Frame(8, 0, 0, 0, b"", b"12345678"),
        Frame(1, 1, 2, 7, b"", b""),
        Frame(10, 0, 0, 0, b"hello", b""),
        Frame(1, 2, 2, 7, b"", b"x" * 50),
    ]
    content = preface() + b"".join(frame(*one) for one in sent)
    for split in range(1, len(content)):
        reader, recorder = made()
        fill(reader, content[:split])
        fill(reader, content[split:])
        assert recorder.seen == [preface(), *sent], split


def test_a_reader_is_midway_exactly_inside_a_frame() -> None:
    sent = [frame(8, payload=b"12345678"), data(1, 0, b"payload" * 9000), data(1, 1)]
    content = preface() + b"".join(sent)
    ends = {0, 16, 16 + len(sent[0]), len(content) - len(sent[2]), len(content)}
    reader, _ = made()
    for position in range(len(content) + 1):
        assert reader.midway == (position not in ends), position
        if position < len(content):
            fill(reader, content[position : position + 1])


def test_a_large_payload_is_received_straight_into_the_targets_memory() -> None:
    reader, recorder = started()
    payload = np.random.default_rng(0).bytes(MAX_PAYLOAD)
    fill(reader, data(1, 0, payload)[:1000])
    target = recorder._target
    assert target is not None
    start = np.frombuffer(target.buffers[0], np.uint8).ctypes.data
    written = 1000 - HEADER.size
    while written < MAX_PAYLOAD - DIRECT:
        buffer = reader.get_buffer()
        assert np.frombuffer(buffer, np.uint8).ctypes.data == start + written, "no copy on the way"
        assert len(buffer) == MAX_PAYLOAD - written, "one call of the kernel can bring all of it"
        count = min(50_000, len(buffer))
        buffer[:count] = payload[written : written + count]
        reader.buffer_updated(count)
        written += count
    fill(reader, payload[written:])
    assert recorder.seen == [Frame(1, 3, 1, 0, b"", payload)]


def test_between_the_frames_of_one_message_little_is_asked_for() -> None:
    """What comes with a header must be copied, so only the header's neighbourhood is asked for."""
    reader, recorder = started()
    assert len(reader.get_buffer()) == STAGING
    recorder.more = True
    fill(reader, data(1, 0, bytes(MAX_PAYLOAD)))
    assert len(reader.get_buffer()) == BETWEEN_FRAMES
    recorder.more = False
    fill(reader, data(1, 0, bytes(MAX_PAYLOAD)))
    assert len(reader.get_buffer()) == STAGING
    recorder.more = True
    fill(reader, data(1, 0, bytes(MAX_PAYLOAD)))
    fill(reader, frame(8))
    assert len(reader.get_buffer()) == STAGING, "another frame came between"


def test_a_frame_that_lies_across_the_end_of_the_staging_memory_is_moved_to_its_beginning() -> None:
    reader, recorder = started()
    small = data(1, 0, b"x" * 1000)
    count = STAGING // len(small)
    fill(reader, small * count + small[:500])
    assert len(reader.get_buffer()) > 0
    fill(reader, small[500:] + frame(8))
    assert recorder.seen == [Frame(1, 3, 1, 0, b"", b"x" * 1000)] * (count + 1) + [Frame(8, 0, 0, 0, b"", b"")]


def test_a_discarding_reader_takes_bytes_for_ever_and_tells_nothing() -> None:
    reader, recorder = started()
    fill(reader, data(1, 0, bytes(100_000))[:50_000])
    reader.discard()
    fill(reader, bytes(3 * STAGING))
    assert recorder.seen == []


@pytest.mark.parametrize("first", [frame(8), data(1, 0, b"x")])
def test_a_handler_that_discards_sees_nothing_of_the_same_read_after_it(first: bytes) -> None:
    reader, recorder = started()

    def end(*_: object) -> None:
        recorder.seen.append(b"end")
        reader.discard()

    recorder.control_received = recorder.data_received = end  # type: ignore[method-assign,assignment]
    fill(reader, first + frame(9) + data(1, 1))
    assert recorder.seen == [b"end"]


@pytest.mark.parametrize(
    ("rate", "size"), [(0.0, MIN_SLICE), (1e6, MIN_SLICE), (200e6, 3 * MIN_SLICE), (1e12, MAX_PAYLOAD)]
)
def test_a_slice_is_what_the_link_carries_in_a_millisecond_within_bounds(rate: float, size: int) -> None:
    assert slice_for(rate) == size


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", [0, 13, 255])
def test_an_unknown_frame_type_is_refused(kind: int) -> None:
    reader, _ = started()
    with pytest.raises(ProtocolError, match=f"unknown frame type {kind}"):
        fill(reader, frame(kind))


@pytest.mark.parametrize(
    ("kind", "head", "payload"),
    [
        (1, MAX_HEAD + 1, 0),
        (1, 0, MAX_PAYLOAD + 1),
        (1, 0, (1 << 32) - 1),
        (8, 0, MAX_CONTROL + 1),
        (10, MAX_HEAD + 1, 0),
    ],
)
def test_a_length_beyond_the_limit_is_refused_from_the_header_alone(kind: int, head: int, payload: int) -> None:
    reader, _ = started()
    with pytest.raises(ProtocolError, match=rf"{FrameType(kind).name} frame declares {head} \+ {payload} bytes"):
        fill(reader, HEADER.pack(kind, 0, head, 0, payload, 0))


@pytest.mark.parametrize(
    ("content", "guess"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", " (an HTTP request)"),
        (b"POST /api HTTP/1.1\r\n\r\n", " (an HTTP request)"),
        (TLS_HELLO, " (a TLS handshake)"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", ""),
    ],
)
def test_what_is_no_p2pml_peer_is_named(content: bytes, guess: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(f"it opened with {content[:16]!r}{guess}") + "$"):
        read_preface(content[:16])


@given(st.binary(min_size=16, max_size=16).filter(lambda content: content[:8] != preface()[:8]))
def test_random_openings_are_refused(content: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a p2pml peer"):
        read_preface(content)


@pytest.mark.parametrize(
    ("theirs", "ours", "spoken"),
    [((1, 1), VERSIONS, 1), ((1, 3), (2, 5), 3), ((2, 9), (1, 4), 4), ((1, 2), (2, 2), 2)],
)
def test_the_highest_common_version_is_spoken(theirs: tuple[int, int], ours: tuple[int, int], spoken: int) -> None:
    assert read_preface(preface(theirs), ours) == spoken
    assert read_preface(preface(ours), theirs) == spoken


@pytest.mark.parametrize(("theirs", "ours"), [((2, 3), (1, 1)), ((1, 1), (2, 3)), ((3, 1), (1, 3))])
def test_without_a_common_version_the_link_is_refused(theirs: tuple[int, int], ours: tuple[int, int]) -> None:
    expected = f"the peer speaks {theirs[0]} to {theirs[1]}, this side {ours[0]} to {ours[1]}"
    with pytest.raises(HandshakeRefused, match=expected) as refused:
        read_preface(preface(theirs), ours)
    assert not refused.value.retryable
