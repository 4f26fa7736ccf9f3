from __future__ import annotations

import re
import struct
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2pml.errors import CompressionError, MessageError, MessageTooLarge
from p2pml.wire import plain
from p2pml.wire.codec import (
    MAX_HEAD,
    Encoded,
    build,
    decode_head,
    encode,
    message,
    plain_dumps,
    plain_loads,
)
from tests.unit.messages import (
    DATA,
    LIMIT,
    TEXT,
    Gradient,
    Plain,
    WithTensors,
    head_of,
    nested,
)

# ------------------------------------------------------------------------------------------------------- receiving

ONE = ["uint8", 3]
REFUSED: list[tuple[bytes, str]] = [
    (b"", "not readable as CBOR"),
    (b"GET / HTTP/1.1\r\n\r\n", "message head: "),
    (head_of("test/gradient", [1, []], []) + b"\0", "bytes after its end"),
    (head_of("test/gradient", [1, []], []) + b"\xff", "not readable as CBOR"),
    (head_of("test/gradient", [1, []], [])[:-1], "not readable as CBOR"),
    (head_of("test/gradient", [1, []]), "not [kind, fields, specs]"),
    (head_of("test/gradient", [1, []], [], "lz4"), "not [kind, fields, specs]"),
    (cbor2.dumps({"kind": 1}), "not [kind, fields, specs]"),
    (head_of("test/nobody", [], []), "unknown kind 'test/nobody'"),
    (head_of("z" * 500, [], []), "unknown kind 'zzz"),
    (head_of(["test/gradient"], [], []), "unknown kind ['test/gradient']"),
    (head_of("test/gradient", [1], []), "test/gradient: expected a list of 2 fields: round, tensors"),
    (head_of("test/gradient", {"round": 1}, []), "test/gradient: expected a list of 2 fields"),
    (head_of("test/gradient", [1.5, []], []), "test/gradient.round: expected int, not float"),
    (head_of("test/gradient", [1 << 64, []], []), "not readable as CBOR"),
    (head_of("test/gradient", [1, None], []), "test/gradient.tensors: expected list, not NoneType"),
    (head_of("test/gradient", [1, True], [ONE]), "test/gradient.tensors: expected list, not bool"),
    (head_of("test/gradient", [1, [1]], [ONE]), "test/gradient.tensors[0]: expected str, not int"),
    (head_of("test/gradient", [1, ["a", "a"]], [ONE, ONE]), "test/gradient.tensors: two tensors of the same name"),
    (head_of("test/gradient", [1, ["a"]], []), "test/gradient: its fields have 1 tensors"),
    (head_of("test/gradient", [1, []], [ONE]), "test/gradient: its fields have 0 tensors"),
    (head_of("test/gradient", [1, []], None), "test/gradient: its fields have 0 tensors"),
    (head_of("test/gradient", [1, ["a"]], ["uint8"]), "test/gradient: a tensor is described as [dtype, *shape]"),
    (head_of("test/gradient", [1, ["a"]], [[]]), "test/gradient: a tensor is described as [dtype, *shape]"),
    (head_of("test/gradient", [1, ["a"]], [[3, 3]]), "test/gradient: a tensor is described as [dtype, *shape]"),
    (head_of("test/gradient", [1, ["a"]], [["object", 3]]), "test/gradient: unknown dtype 'object'"),
    (head_of("test/gradient", [1, ["a"]], [["uint8", -1]]), "test/gradient: the shape [-1]"),
    (head_of("test/gradient", [1, ["a"]], [["uint8", True]]), "test/gradient: the shape [True]"),
    (head_of("test/gradient", [1, ["a"]], [["uint8", 1.5]]), "test/gradient: the shape [1.5]"),
    (head_of("test/gradient", [1, ["a"]], [["uint8", *[1] * 65]]), "test/gradient: a tensor of 65 dimensions"),
    (head_of("test/gradient", [1, ["a"]], [["uint8", 1 << 32, 1 << 31]]), "larger than any memory"),
    (head_of("test/gradient", [1, ["a"]], [["float64", 0, 1 << 60]]), "larger than any memory"),
    (head_of("test/tensors", [1, None, None, 0, None, None, None], []), "test/tensors.one: expected a tensor"),
    (head_of("test/tensors", [1, True, False, 0, None, None, None], [ONE]), "test/tensors.maybe: expected a tensor"),
    (head_of("test/tensors", [1, True, None, -1, None, None, None], [ONE]), "some: expected a count"),
    (head_of("test/tensors", [1, True, None, True, None, None, None], [ONE]), "some: expected a count"),
    (head_of("test/tensors", [1, True, None, 1 << 60, None, None, None], [ONE]), "1152921504606846977 tensors"),
    (head_of("test/gradient", [1, ["a"]], [ONE], "rar", [3]), "test/gradient: unknown compression 'rar'"),
    (head_of("test/gradient", [1, ["a"]], [ONE], None, [3]), "test/gradient: unknown compression None"),
    (head_of("test/gradient", [1, ["a"]], [ONE], "lz4", []), "test/gradient: expected a list of 1 sizes"),
    (head_of("test/gradient", [1, ["a"]], [ONE], "lz4", 3), "test/gradient: expected a list of 1 sizes"),
    (head_of("test/gradient", [1, ["a"]], [ONE], "lz4", [2.0]), "test/gradient: expected a list of 1 sizes"),
    (head_of("test/gradient", [1, ["a"]], [ONE], "lz4", [4]), "test/gradient: 4 compressed bytes for a tensor of 3"),
    (head_of("test/gradient", [1, ["a"]], [ONE], "lz4", [-1]), "test/gradient: -1 compressed bytes"),
]


@pytest.mark.parametrize(("data", "fault"), REFUSED, ids=[fault for _, fault in REFUSED])
def test_a_bad_head_is_refused_with_what_is_wrong(data: bytes, fault: str) -> None:
    with pytest.raises(MessageError, match=re.escape(fault)) as raised:
        decode_head(data, max_message=LIMIT)
    assert len(str(raised.value)) < 300  # a peer does not fill our logs


def test_a_ratio_that_no_compression_has_is_refused() -> None:
    with pytest.raises(CompressionError, match="lz4: 10 bytes cannot hold 2551"):
        decode_head(head_of("test/gradient", [1, ["a"]], [["uint8", 2551]], "lz4", [10]), max_message=LIMIT)
    head = decode_head(head_of("test/gradient", [1, ["a"]], [["uint8", 2550]], "lz4", [10]), max_message=LIMIT)
    assert (head.codec, head.sizes, head.raw_size, head.wire_size) == ("lz4", [10], 2550, 10)


def test_max_message_limits_head_and_tensors_together() -> None:
    encoded = encode(Gradient(1, {"a": np.zeros(10, np.uint8), "b": np.zeros(5, np.uint8)}))
    assert decode_head(encoded.head, max_message=encoded.size).raw_size == 15
    with pytest.raises(MessageTooLarge, match=rf"test/gradient: {encoded.size} bytes \(at most {encoded.size - 1}\)"):
        decode_head(encoded.head, max_message=encoded.size - 1)
    plain_message = encode(Plain(1))
    with pytest.raises(MessageTooLarge):
        decode_head(plain_message.head, max_message=plain_message.size - 1)
    with pytest.raises(MessageTooLarge, match=r"message head: 16385 bytes \(at most 16384\)"):
        decode_head(bytes(MAX_HEAD + 1), max_message=LIMIT)


def test_tensors_above_four_gib_are_announced() -> None:
    data = head_of("test/gradient", [1, ["a"]], [["float32", 1 << 31, 3]])
    assert decode_head(data, max_message=LIMIT).sizes == [3 << 33]


def test_buffers_must_fit() -> None:
    head = decode_head(head_of("test/gradient", [1, ["a"]], [ONE]), max_message=LIMIT)
    with pytest.raises(MessageError, match="test/gradient: 2 buffers for 1 tensors"):
        build(head, [memoryview(b"abc")] * 2)
    with pytest.raises(MessageError, match=r"test/gradient: a tensor uint8\[3\] has 3 bytes, not 2"):
        build(head, [memoryview(b"ab")])


def test_a_class_may_refuse_values() -> None:
    @message("test/positive")
    class Positive:
        value: int

        def __post_init__(self) -> None:
            if self.value < 0:
                raise ValueError("it must not be negative")

    head = decode_head(head_of("test/positive", [-1], []), max_message=LIMIT)
    with pytest.raises(MessageError, match="test/positive: it must not be negative"):
        build(head, [])


def test_a_compressed_message_carries_its_sizes() -> None:
    encoded = encode(Gradient(1, {"a": bytes(100), "b": b""}))
    packed = encoded.packed("zstd", [memoryview(b"x" * 7), memoryview(b"")])
    assert packed.head == head_of("test/gradient", [1, ["a", "b"]], [["uint8", 100], ["uint8", 0]], "zstd", [7, 0])
    head = decode_head(packed.head, max_message=LIMIT)
    assert (head.codec, head.sizes, head.raw_size, head.wire_size) == ("zstd", [7, 0], 100, 7)
    assert packed.size == len(packed.head) + 7
    with pytest.raises(MessageTooLarge):
        Encoded(bytes(MAX_HEAD), [], []).packed("zstd", [])


# ------------------------------------------------------------------------------------------------------ hostile input

BOMBS = {
    "array of 2**40": b"\x9b" + struct.pack(">Q", 1 << 40),
    "array of 2**64 - 1": b"\x9b" + b"\xff" * 8,
    "map of 2**40": b"\xbb" + struct.pack(">Q", 1 << 40),
    "bytes of 2**40": b"\x5b" + struct.pack(">Q", 1 << 40),
    "text of 2**40": b"\x7b" + struct.pack(">Q", 1 << 40),
    "10,000 nested arrays": b"\x81" * 10_000 + b"\0",
    "10,000 nested maps": b"\xa1\x00" * 5_000 + b"\0",
    "10,000 nested tags": b"\xc6" * 10_000 + b"\0",
    "nested indefinite arrays": b"\x9f" * 10_000,
    "indefinite array": b"\x83\x9f\xff\0\0",
    "a date": b"\xc1\xfb\x7f\xef" + b"\xff" * 6,
    "a big number": b"\xc2\x59\x10\x00" + b"\xff" * 4096,
    "a huge decimal": b"\xc4\x82\x1a\x05\xf5\xe1\x00\x01",
    "a huge float": b"\xc5\x82\x1a\x05\xf5\xe1\x00\x01",
    "a rational": b"\xd8\x1e\x82\x01\x00",
    "a regular expression": b"\xd8\x23\x6e(a+)+(a+)+(a+)",
    "a mail": b"\xd8\x24\x61a",
    "a cyclic list": b"\xd8\x1c\x81\xd8\x1d\x00",
    "a shared value": b"\x82\xd8\x1c\x80\xd8\x1d\x00",
    "string references": b"\xd9\x01\x00\x82\x63abc\xd8\x19\x00",
    "a set": b"\xd9\x01\x02\x81\x00",
    "an unknown tag": b"\xda\x00\x01\x00\x00\x01",
    "self-described CBOR": b"\xd9\xd9\xf7\x80",
    "a simple value": b"\xf8\xff",
    "undefined": b"\xf7",
    "a lonely break": b"\xff",
    "text that is no UTF-8": b"\x61\xff",
    "a surrogate": b"\x63\xed\xa0\x80",
    "duplicate keys": b"\xa2\x61a\x00\x61a\x01",
    "a list as key": b"\xa1\x80\x00",
    "a map as key": b"\xa1\xa0\x00",
    "a float as key": b"\xa1\xf9\x3c\x00\x00",
    "none as key": b"\xa1\xf6\x00",
    "bytes as key": b"\xa1\x41a\x00",
    "a negative int of 65 bits": b"\x3b" + b"\xff" * 8,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_what_is_not_plain_data_is_refused_wherever_it_stands(bomb: bytes) -> None:
    count = len(Plain.__slots__)  # type: ignore[attr-defined]
    fields = cbor2.dumps([getattr(Plain(1), name) for name in Plain.__slots__])  # type: ignore[attr-defined]
    assert fields[-1:] == b"\xf6"
    assert fields[0] == 0x80 + count
    head = b"\x83" + cbor2.dumps("test/plain")
    decode_head(head + fields + b"\x80", max_message=LIMIT)
    for data in (bomb, head + fields[:-1] + bomb + b"\x80", head + fields + bomb, b"\x83" + bomb + fields + b"\x80"):
        with pytest.raises(MessageError):
            decode_head(data, max_message=LIMIT)
    for data in (bomb, b"\xa1\x61a" + bomb):
        with pytest.raises(MessageError, match="HELLO"):
            plain_loads(data, "HELLO")


def test_a_declared_size_takes_no_memory() -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        for name, bomb in BOMBS.items():
            tracemalloc.reset_peak()
            with pytest.raises(MessageError):
                plain_loads(bomb, name)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, name
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_message_errors(data: bytes) -> None:
    for read in (lambda: decode_head(data, max_message=LIMIT), lambda: plain_loads(data, "HELLO")):
        try:
            read()
        except MessageError:
            continue


HEADS = [
    encode(Plain(1, 0.5, "a", True, b"b", sizes=[1], path=("c",), table={"d": [1.0]}, anything={1: [None, "e"]})).head,
    encode(WithTensors(1, b"abc", b"d", [b"e"], {"f": np.zeros((2, 3))}, {}, [])).head,
    encode(Gradient(1, {"a": bytes(99)})).packed("lz4", [memoryview(b"x" * 9)]).head,
]


MUTATIONS = st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3), st.integers(0, 3)), max_size=4)


@given(st.sampled_from(HEADS), MUTATIONS)
@example(HEADS[0], [])
def test_mutated_heads_raise_nothing_but_message_errors(data: bytes, mutations: list[tuple[int, bytes, int]]) -> None:
    for at, inserted, removed in mutations:
        at %= len(data) + 1
        data = data[:at] + inserted + data[at + removed :]
    try:
        head = decode_head(data, max_message=1 << 20)
        assert head.raw_size <= 1 << 20
        arrived = build(head, [memoryview(bytearray(spec.nbytes)) for spec in head.specs])
    except MessageError:
        return
    encode(arrived)  # what was accepted can be sent on


@given(st.lists(st.sampled_from(HEADS), min_size=2, max_size=2), st.binary(max_size=9))
def test_a_tail_is_always_found(heads: list[bytes], between: bytes) -> None:
    for data in (heads[0] + heads[1], heads[0] + b"\xff" + between, heads[0] + between + b"\0"):
        with pytest.raises(MessageError):
            decode_head(data, max_message=LIMIT)


# --------------------------------------------------------------------------------------------------------- plain maps


@given(st.dictionaries(TEXT, DATA, max_size=5))
def test_plain_maps_arrive_as_they_were_sent(value: dict[str, Any]) -> None:
    assert plain_loads(plain_dumps(value), "HELLO") == value


def test_plain_maps_name_what_is_wrong() -> None:
    with pytest.raises(MessageError, match=r"HELLO: expected a map, not list"):
        plain_loads(cbor2.dumps([1]), "HELLO")
    with pytest.raises(MessageError, match=r"HELLO\[1\]: expected str, not int"):
        plain_loads(cbor2.dumps({1: 1}), "HELLO")
    with pytest.raises(MessageError, match=r"HELLO\['a'\]\[0\]: expected plain data, not cbor2.Undefined"):
        plain_loads(cbor2.dumps({"a": [cbor2.undefined]}), "HELLO")
    with pytest.raises(MessageTooLarge, match=r"HELLO: 9 bytes \(at most 8\)"):
        plain_loads(bytes(9), "HELLO", 8)
    with pytest.raises(MessageError, match=r"meta\['a'\]: expected plain data, not object"):
        plain_dumps({"a": object()}, "meta")
    with pytest.raises(MessageError, match="meta: 'utf-8'"):
        plain_dumps({"a": "\ud800"}, "meta")
    assert plain.MAX_DEPTH == 16
    assert plain_loads(plain_dumps({"a": nested(15)}), "HELLO") == {"a": nested(15)}
