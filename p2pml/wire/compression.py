"""Compression of a message's segments, each on its own: LZ4 blocks, or Zstandard frames of level 1.

Whether it pays is measured, not assumed (`Chooser`): on a fast link it costs more time than it saves. Compressing takes
its time: call it in a worker thread. A receiver believes no size: the ratio is checked against what the format can do,
and a payload must give exactly the declared bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from p2pml.errors import CompressionError, MessageTooLarge

if TYPE_CHECKING:
    from p2pml.wire.codec import Encoded, Head

MAX_RATIO = {"lz4": 255, "zstd": 32768}
"""Raw bytes that one compressed byte can stand for: a byte of an LZ4 match length adds 255; a Zstandard block of 128
KiB takes at least 4. No honest payload exceeds these, not even one of zeros, so that a larger ratio is a lie."""
CODECS = tuple(MAX_RATIO)
SAMPLE = 64 * 1024
"""Bytes of a sample from which `Chooser` judges a message."""
RATES = {"lz4": (600e6, 1500e6), "zstd": (300e6, 470e6)}
"""Bytes/s of raw data that one core of a small machine compresses and decompresses, of float32 noise."""

_WORTH = 0.97  # of the size, or of the time, that must be left for compression to be worth it
_LZ4_LARGEST = 0x7E000000
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_MAX_WINDOW = 8 << 20


def check_ratio(codec: str, wire: int, raw: int) -> None:
    """Refuse sizes that `codec` cannot have produced: `CompressionError` if `raw` > `wire` * its `MAX_RATIO`."""
    if raw > wire * _ratio(codec):
        raise CompressionError(f"{codec}: {wire} bytes cannot hold {raw}")


def compress(codec: str, segments: Sequence[memoryview]) -> list[bytes]:
    """Each segment compressed. Raises `CompressionError` for a codec that is unknown, or that cannot take a size (LZ4:
    2 GB)."""
    _ratio(codec)
    if codec == "zstd":
        import zstandard

        compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
        return [compressor.compress(segment) for segment in segments]
    import lz4.block

    for segment in segments:
        if len(segment) > _LZ4_LARGEST:
            raise CompressionError(f"lz4: a segment of {len(segment)} bytes (at most {_LZ4_LARGEST})")
    return [lz4.block.compress(segment, store_size=False) for segment in segments]


def decompress_into(codec: str, data: memoryview, target: memoryview) -> None:
    """Fill `target` (bytes, writable) with the contents of `data`, which must be exactly as long.

    Neither library checks its input to the end when it writes into given memory, so that one copy of the target's size
    is made on the way, and no more. Raises `CompressionError`; `target` is then unchanged.
    """
    check_ratio(codec, len(data), len(target))
    raw = _decompress_zstd(data, len(target)) if codec == "zstd" else _decompress_lz4(data, len(target))
    if len(raw) != len(target):
        raise CompressionError(f"{codec}: {len(raw)} bytes came out of a payload for {len(target)}")
    target[:] = raw


def _decompress_zstd(data: memoryview, size: int) -> bytes:
    import zstandard

    try:
        if data[:4] != _ZSTD_MAGIC:
            raise CompressionError("zstd: not a frame")
        frame = zstandard.get_frame_parameters(data)
        # Before anything is decoded: the library would allocate what the frame declares, whatever the limit it is
        # given.
        if frame.content_size != size:
            raise CompressionError(f"zstd: the frame is not one of {size} bytes")
        if frame.dict_id or frame.window_size > _ZSTD_MAX_WINDOW:
            raise CompressionError("zstd: the frame wants a dictionary or too large a window")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CompressionError(f"zstd: {error}") from error


def _decompress_lz4(data: memoryview, size: int) -> bytes:
    import lz4.block

    try:
        raw: bytes = lz4.block.decompress(data, uncompressed_size=size)
    except (lz4.block.LZ4BlockError, ValueError, OverflowError) as error:
        raise CompressionError(f"lz4: {error}") from error
    return raw


def _ratio(codec: str) -> int:
    if codec not in MAX_RATIO:
        raise CompressionError(f"unknown compression {codec!r:.80} (there are: {', '.join(CODECS)})")
    return MAX_RATIO[codec]


# ------------------------------------------------------------------------------------------------- whole messages


def wire_message(encoded: Encoded, codec: str) -> Encoded:
    """The message with its segments compressed by `codec`, or itself if that would not save 3 % of its bytes.

    A segment that does not shrink stays as it is, in the tensor's own memory.
    """
    if encoded.codec is not None:
        return encoded
    packed = [_smaller(codec, segment) for segment in encoded.segments]
    try:
        made = encoded.packed(codec, packed)
    except MessageTooLarge:  # so many tensors that the list of sizes does not fit into the head
        return encoded
    return made if made.size < encoded.size * _WORTH else encoded


def _smaller(codec: str, segment: memoryview) -> memoryview:
    if codec == "lz4" and len(segment) > _LZ4_LARGEST:
        return segment
    (packed,) = compress(codec, [segment])
    return memoryview(packed) if len(packed) < len(segment) else segment


def unpack(head: Head, segments: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
    """Fill `targets`, one for each tensor of `head`, from its segments as they came. Raises `CompressionError`.

    A segment as long as its tensor was sent as it is.
    """
    for spec, segment, target in zip(head.specs, segments, targets, strict=True):
        if len(target) != spec.nbytes:
            raise CompressionError(f"{head.kind}: {len(target)} bytes of memory for a tensor {spec}")
        if len(segment) == len(target):
            target[:] = segment
        elif head.codec is None:
            raise CompressionError(f"{head.kind}: {len(segment)} bytes for a tensor {spec}")
        else:
            decompress_into(head.codec, segment, target)


# ------------------------------------------------------------------------------------------------------- choosing


def sample_of(segments: Sequence[memoryview]) -> memoryview:
    """At most `SAMPLE` bytes to judge a message by: the middle of its largest segment, as a view."""
    largest = max(segments, key=len, default=memoryview(b""))
    start = max(0, len(largest) - SAMPLE) // 2
    return largest[start : start + SAMPLE]


class Chooser:
    """Decides for 'auto' what gets a message to the other side soonest: no compression, LZ4 or Zstandard.

    `rates` are bytes/s of raw data, to compress and to decompress, of one core; `observe` replaces them by what was
    measured. Only codecs with a rate are chosen from.
    """

    def __init__(self, codecs: Sequence[str] = CODECS, rates: Mapping[str, tuple[float, float]] = RATES) -> None:
        self.rates = {codec: rates[codec] for codec in codecs if codec in rates}

    def observe(self, codec: str, size: int, seconds: float) -> None:
        """Learn that compressing `size` raw bytes took `seconds`; the other direction is taken to change alike."""
        if seconds <= 0 or codec not in self.rates:
            return
        compressing, decompressing = self.rates[codec]
        factor = 1 + 0.25 * (size / seconds / compressing - 1)
        self.rates[codec] = compressing * factor, decompressing * factor

    def choose(self, size: int, sample: memoryview, link_bytes_per_second: float | None) -> str | None:
        """The codec for a message of `size` bytes, or None.

        Counted is the time to compress all of it, then to send, then to decompress; a codec must save 3 % of the plain
        time. While the link's speed is unknown the answer is None: the first message measures it, and compressing on
        the guess of a slow link could make a fast one several times slower. The sample is compressed (which takes well
        under a millisecond) only where the link is slow enough for it to matter.
        """
        if not link_bytes_per_second or not len(sample):
            return None
        plain = size / link_bytes_per_second
        best, least = None, plain * _WORTH
        for codec, (compressing, decompressing) in self.rates.items():
            work = size / compressing + size / decompressing
            if work < least:
                (packed,) = compress(codec, [sample])
                time = work + plain * len(packed) / len(sample)
                if time < least:
                    best, least = codec, time
        return best
