from __future__ import annotations

import random
from typing import Any

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from p2pml.errors import CompressionError, MessageError
from p2pml.wire import compression
from p2pml.wire.codec import Tensors, build, decode_head, encode, message
from p2pml.wire.compression import (
    CODECS,
    MAX_RATIO,
    RATES,
    SAMPLE,
    Chooser,
    check_ratio,
    compress,
    decompress_into,
    sample_of,
    unpack,
    wire_message,
)

LIMIT = 1 << 40
NOISE = random.Random(1).randbytes(1 << 20)


@message("test/compressed")
class Compressed:
    tensors: Tensors


def decompressed(codec: str, packed: bytes, size: int) -> bytes:
    target = bytearray(size)
    decompress_into(codec, memoryview(packed), memoryview(target))
    return bytes(target)


def transmit(encoded: Any) -> Any:
    head = decode_head(encoded.head, max_message=LIMIT)
    assert head.sizes == [len(segment) for segment in encoded.segments]
    targets = [memoryview(bytearray(spec.nbytes)) for spec in head.specs]
    unpack(head, [memoryview(bytes(segment)) for segment in encoded.segments], targets)
    return build(head, targets)


# -------------------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("codec", CODECS)
@given(st.lists(st.binary(max_size=300) | st.binary(min_size=1, max_size=3).map(lambda data: data * 999), max_size=3))
def test_segments_come_back(codec: str, segments: list[bytes]) -> None:
    packed = compress(codec, [memoryview(segment) for segment in segments])
    assert [decompressed(codec, *pair) for pair in zip(packed, map(len, segments), strict=True)] == segments


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 10, 300, 1 << 16, (1 << 17) + 1, 1 << 20, 5 << 20])
def test_zeros_are_within_the_bound_on_ratios(codec: str, size: int) -> None:
    (packed,) = compress(codec, [memoryview(bytes(size))])
    check_ratio(codec, len(packed), size)
    assert decompressed(codec, packed, size) == bytes(size)


@pytest.mark.parametrize("codec", CODECS)
def test_a_ratio_that_the_format_does_not_have(codec: str) -> None:
    check_ratio(codec, 10, 10 * MAX_RATIO[codec])
    with pytest.raises(CompressionError, match=f"{codec}: 10 bytes cannot hold"):
        check_ratio(codec, 10, 10 * MAX_RATIO[codec] + 1)
    with pytest.raises(CompressionError, match=f"{codec}: 0 bytes cannot hold 1"):
        decompressed(codec, b"", 1)


def test_unknown_codecs() -> None:
    with pytest.raises(CompressionError, match=r"unknown compression 'rar' \(there are: lz4, zstd\)"):
        compress("rar", [])
    with pytest.raises(CompressionError, match="unknown compression"):
        decompressed("none", b"abc", 3)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("data", [b"abc" * 1000, NOISE[:3000]], ids=["text", "noise"])
def test_a_payload_must_give_exactly_the_declared_bytes(codec: str, data: bytes) -> None:
    (packed,) = compress(codec, [memoryview(data)])
    lies = [(packed, 2999), (packed, 3001), (packed[:-1], 3000), (packed + b"\0", 3000), (packed + packed, 3000)]
    lies += [(packed + packed, 6000), (packed[1:], 3000), (b"\0" * 100, 3000), (NOISE[:100], 3000)]
    for lie, size in lies:
        target = bytearray(b"\x55" * size)
        with pytest.raises(CompressionError, match=codec):
            decompress_into(codec, memoryview(lie), memoryview(target))
        assert target == b"\x55" * size
    assert decompressed(codec, packed, 3000) == data


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=100), size=st.integers(0, 500))
def test_arbitrary_bytes_raise_nothing_but_compression_errors(codec: str, data: bytes, size: int) -> None:
    try:
        decompressed(codec, data, size)
    except CompressionError:
        return


@pytest.mark.parametrize("codec", CODECS)
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_damage_raises_nothing_but_compression_errors(codec: str, at: int, byte: int) -> None:
    (packed,) = compress(codec, [memoryview(b"a fairly regular text, " * 50 + NOISE[:100])])
    damaged = bytearray(packed)
    damaged[at % len(packed)] = byte
    try:
        decompressed(codec, bytes(damaged), 23 * 50 + 100)
    except CompressionError:
        return


def test_zstandard_frames_of_other_kinds_are_refused() -> None:
    data = NOISE[:1000] * 20_000
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"abc" * 100)
    with pytest.raises(CompressionError, match="zstd: the frame is not one of 300 bytes"):
        decompressed("zstd", unsized, 300)
    wide = zstandard.ZstdCompressionParameters(window_log=24, write_content_size=1)
    streamed = zstandard.ZstdCompressor(compression_params=wide).compressobj(size=len(data))
    with pytest.raises(CompressionError, match="too large a window"):
        decompressed("zstd", (streamed.compress(data) + streamed.flush())[: 1 << 16], len(data))
    with_id = b"\x28\xb5\x2f\xfd" + b"\x21\x07\x03" + b"\x19\0\0abc"  # one segment, dictionary 7, three raw bytes
    assert zstandard.get_frame_parameters(with_id).dict_id == 7
    with pytest.raises(CompressionError, match="wants a dictionary"):
        decompressed("zstd", with_id, 3)
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    with pytest.raises(CompressionError, match="not a frame"):
        decompressed("zstd", skippable, 4)


def test_a_bomb_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))

    def explode(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a decompressor was started")

    monkeypatch.setattr(zstandard, "ZstdDecompressor", explode)
    with pytest.raises(CompressionError, match="the frame is not one of 1048576 bytes"):
        decompressed("zstd", bomb, 1 << 20)
    monkeypatch.setattr(lz4.block, "decompress", explode)
    with pytest.raises(CompressionError, match="cannot hold"):
        decompressed("lz4", lz4.block.compress(bytes(1 << 20), store_size=False)[:1000], 1 << 20)


def test_what_the_lz4_library_cannot_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_RATIO, "lz4", 1 << 40)
    with pytest.raises(CompressionError, match="lz4: "):
        compression._decompress_lz4(memoryview(b"\0"), 1 << 40)


# -------------------------------------------------------------------------------------------------- whole messages


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_is_compressed_where_it_shrinks(codec: str) -> None:
    sent = Compressed({"zeros": np.zeros(1000), "noise": NOISE[:1000], "none": b"", "scalar": np.array(1.5)})
    encoded = encode(sent)
    packed = wire_message(encoded, codec)
    assert packed.codec == codec
    assert packed.size < encoded.size / 2
    zeros, noise, none, scalar = packed.segments
    assert len(zeros) < 100
    assert [noise, none, scalar] == encoded.segments[1:]
    assert noise is encoded.segments[1]  # its own memory, not a copy
    assert transmit(packed) == sent
    assert wire_message(packed, codec) is packed


@pytest.mark.parametrize("codec", CODECS)
@given(
    st.dictionaries(
        st.text("abc", max_size=3), st.tuples(st.sampled_from(["f4", "i2"]), st.integers(0, 500)), max_size=4
    )
)
def test_compressed_messages_arrive_as_they_were_sent(codec: str, shapes: dict[str, tuple[str, int]]) -> None:
    sent = Compressed({name: np.arange(size).astype(dtype) % 7 for name, (dtype, size) in shapes.items()})
    assert transmit(wire_message(encode(sent), codec)) == sent


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_that_would_hardly_shrink_is_left_as_it_is(codec: str) -> None:
    hardly = encode(Compressed({"noise": NOISE[:100_000], "zeros": bytes(2_900)}))
    assert wire_message(hardly, codec) is hardly
    enough = encode(Compressed({"noise": NOISE[:100_000], "zeros": bytes(3_500)}))
    assert wire_message(enough, codec).codec == codec
    empty = encode(Compressed({}))
    assert wire_message(empty, codec) is empty


def test_a_message_whose_head_has_no_room_for_sizes_is_left_as_it_is() -> None:
    encoded = encode(Compressed({f"{index:04}": bytes(100) for index in range(1150)}))
    assert len(encoded.head) < 16384 < len(encoded.head) + 1150
    assert wire_message(encoded, "lz4") is encoded


def test_segments_too_large_for_lz4_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_LZ4_LARGEST", 1000)
    encoded = encode(Compressed({"small": bytes(1000), "large": bytes(1001)}))
    packed = wire_message(encoded, "lz4")
    assert packed.segments[1] is encoded.segments[1]
    assert packed.codec == "lz4"
    assert len(wire_message(encoded, "zstd").segments[1]) < 100
    with pytest.raises(CompressionError, match=r"lz4: a segment of 1001 bytes \(at most 1000\)"):
        compress("lz4", encoded.segments)


def test_unpacking_needs_the_right_memory() -> None:
    head = decode_head(wire_message(encode(Compressed({"a": bytes(1000)})), "lz4").head, max_message=LIMIT)
    with pytest.raises(CompressionError, match=r"test/compressed: 999 bytes of memory for a tensor uint8\[1000\]"):
        unpack(head, [memoryview(b"x")], [memoryview(bytearray(999))])
    head = decode_head(encode(Compressed({"a": bytes(1000)})).head, max_message=LIMIT)
    with pytest.raises(CompressionError, match=r"test/compressed: 10 bytes for a tensor uint8\[1000\]"):
        unpack(head, [memoryview(bytes(10))], [memoryview(bytearray(1000))])


@pytest.mark.parametrize("codec", CODECS)
def test_a_lie_about_the_raw_size_is_found(codec: str) -> None:
    packed = wire_message(encode(Compressed({"a": bytes(1000)})), codec)
    lie = encode(Compressed({"a": bytes(1001)})).packed(codec, packed.segments)
    with pytest.raises(MessageError, match=codec):
        transmit(lie)


# ------------------------------------------------------------------------------------------------------- choosing


def test_a_sample_is_the_middle_of_the_largest_segment() -> None:
    large = memoryview(NOISE)
    sample = sample_of([memoryview(b"abc"), large, memoryview(b"")])
    start = (len(NOISE) - SAMPLE) // 2
    assert sample == NOISE[start : start + SAMPLE]
    assert sample.obj is large.obj
    assert bytes(sample_of([memoryview(b"abc"), memoryview(b"")])) == b"abc"
    assert bytes(sample_of([])) == b""


MODEL = 46_400_000
REGULAR = memoryview(b"".join(index.to_bytes(4, "little") for index in range(SAMPLE // 4)))
FLOATS = memoryview(np.random.default_rng(1).normal(size=SAMPLE // 4).astype(np.float32).tobytes())


def test_nothing_is_compressed_on_a_fast_or_an_unknown_link() -> None:
    chooser = Chooser()
    for speed in (None, 0.0, 3e9, 1e9):
        assert chooser.choose(MODEL, memoryview(bytes(SAMPLE)), speed) is None
    assert chooser.choose(0, memoryview(b""), 1e5) is None


def test_the_slower_the_link_the_stronger_the_compression() -> None:
    chooser = Chooser()
    order = [None, "lz4", "zstd"]
    chosen = [chooser.choose(MODEL, REGULAR, speed) for speed in (1e9, 1e8, 3e7, 1e7, 1e6, 1e5)]
    assert [order.index(codec) for codec in chosen] == sorted(order.index(codec) for codec in chosen)
    assert (chosen[0], chosen[-1]) == (None, "zstd")
    assert chooser.choose(MODEL, memoryview(bytes(SAMPLE)), 3e8) == "lz4"  # both shrink it to nothing: the faster one


def test_noise_is_not_compressed_however_slow_the_link() -> None:
    assert Chooser().choose(MODEL, memoryview(NOISE)[:SAMPLE], 1e4) is None
    assert Chooser(["lz4"]).choose(MODEL, FLOATS, 1e4) is None
    assert Chooser().choose(MODEL, FLOATS, 1e4) == "zstd"  # the exponents are worth 8 %


def test_the_choice_takes_least_time() -> None:
    rates = {"lz4": (1e8, 1e8), "zstd": (5e7, 5e7)}
    sizes = {codec: len(compress(codec, [REGULAR])[0]) / SAMPLE for codec in CODECS}
    for speed in (1e6, 5e6, 1e7, 2e7, 4e7, 1e8):
        times: dict[str | None, float] = {None: 0.97 / speed}
        times |= {codec: 1 / rates[codec][0] + 1 / rates[codec][1] + sizes[codec] / speed for codec in CODECS}
        assert Chooser(rates=rates).choose(MODEL, REGULAR, speed) == min(times, key=times.__getitem__)


def test_only_what_the_peer_knows_is_chosen() -> None:
    assert Chooser(["lz4", "brotli"]).choose(MODEL, REGULAR, 1e5) in (None, "lz4")
    assert Chooser([]).choose(MODEL, REGULAR, 1e5) is None


def test_measured_rates_replace_the_assumed() -> None:
    chooser = Chooser()
    zeros = memoryview(bytes(SAMPLE))
    assert chooser.choose(MODEL, zeros, 1e7) == "lz4"
    for _ in range(50):
        chooser.observe("lz4", 1_000_000, 1.0)
    assert chooser.rates["lz4"] == pytest.approx((1e6, 2.5e6), rel=0.01)
    assert chooser.choose(MODEL, zeros, 1e7) == "zstd"
    chooser.observe("lz4", 1, 0.0)
    chooser.observe("brotli", 1, 1.0)
    assert chooser.rates["zstd"] == RATES["zstd"]
