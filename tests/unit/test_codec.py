from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Literal, Optional

import cbor2
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from p2pml.errors import CompressionError, MessageError, MessageTooLarge
from p2pml.wire import plain
from p2pml.wire.codec import (
    MAX_HEAD,
    Encoded,
    Head,
    Tensor,
    TensorLike,
    Tensors,
    build,
    decode_head,
    encode,
    kind_of,
    message,
    plain_dumps,
    plain_loads,
)
from p2pml.wire.tensors import TensorSpec

LIMIT = 1 << 40


@message("test/plain")
class Plain:
    round: int
    weight: float = 1.0
    name: str = ""
    ok: bool = False
    data: bytes = b""
    nothing: None = None
    maybe: int | None = None
    perhaps: Optional[str] = None  # noqa: UP045 - users write it
    sizes: list[int] = ()  # type: ignore[assignment]
    path: tuple[str, ...] = ()
    pair: tuple[int, str] = (0, "")
    table: dict[str, list[float]] | None = None
    numbers: dict[int, Any] | None = None
    anything: Any = None
    kinds: ClassVar[int] = 3


@message("test/tensors")
class WithTensors:
    step: int
    one: TensorLike
    maybe: TensorLike | None = None
    some: list[TensorLike] = ()  # type: ignore[assignment]
    named: Tensors | None = None
    named_too: dict[str, Tensor] | None = None
    some_maybe: list[TensorLike] | None = None


@message("test/received")
class OnlyTensors:
    one: Tensor
    some: list[Tensor]


@message("test/gradient")
class Gradient:
    round: int
    tensors: Tensors


def transmit(sent: Any) -> Any:
    """What arrives of a message: decoded from a copy of its bytes."""
    encoded = encode(sent)
    head = decode_head(encoded.head, max_message=LIMIT)
    assert (head.codec, head.specs) == (None, encoded.specs)
    assert head.raw_size == head.wire_size == encoded.size - len(encoded.head) == sum(head.sizes)
    return build(head, [memoryview(bytearray(segment)) for segment in encoded.segments])


def head_of(*top: Any) -> bytes:
    return cbor2.dumps(list(top))


# ----------------------------------------------------------------------------------------------------- round trips

INTS = st.integers(-(1 << 63), (1 << 64) - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.none() | st.booleans() | INTS | FLOATS | TEXT | st.binary(max_size=20)
DATA = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | INTS, inner, max_size=3), max_leaves=8
)


@given(
    st.builds(
        Plain,
        round=INTS,
        weight=FLOATS,
        name=TEXT,
        ok=st.booleans(),
        data=st.binary(max_size=30),
        maybe=st.none() | INTS,
        perhaps=st.none() | TEXT,
        sizes=st.lists(INTS, max_size=4),
        path=st.lists(TEXT, max_size=3).map(tuple),
        pair=st.tuples(INTS, TEXT),
        table=st.none() | st.dictionaries(TEXT, st.lists(FLOATS, max_size=3), max_size=3),
        numbers=st.none() | st.dictionaries(INTS, DATA, max_size=3),
        anything=DATA,
    )
)
def test_plain_messages_arrive_as_they_were_sent(sent: Plain) -> None:
    arrived = transmit(sent)
    assert arrived == sent
    assert repr(arrived) == repr(sent)  # also the types: 1 is not 1.0 is not True


TENSORS = st.sampled_from(["f4", "f2", "?", "i8", "c8"]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, dtype))
)


@given(
    st.builds(
        WithTensors,
        step=INTS,
        one=TENSORS,
        maybe=st.none() | TENSORS,
        some=st.lists(TENSORS, max_size=3),
        named=st.none() | st.dictionaries(TEXT, TENSORS, max_size=3),
        named_too=st.none() | st.dictionaries(TEXT, TENSORS, max_size=3),
        some_maybe=st.none() | st.lists(TENSORS, max_size=3),
    )
)
def test_messages_with_tensors_arrive_as_they_were_sent(sent: WithTensors) -> None:
    arrived = transmit(sent)
    assert arrived == sent
    assert isinstance(arrived.one, Tensor)
    assert (arrived.maybe is None) == (sent.maybe is None)
    assert [tensor.shape for tensor in arrived.some] == [array.shape for array in sent.some]
    if sent.named is not None:
        assert list(arrived.named) == list(sent.named)
        for name, array in sent.named.items():
            assert arrived.named[name].numpy().tobytes() == array.tobytes()


def test_tensors_travel_from_and_into_their_own_memory() -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    bias = torch.ones(2, dtype=torch.bfloat16)
    encoded = encode(Gradient(7, {"weight": weights, "bias": bias}))
    addresses = [np.frombuffer(segment, np.uint8).ctypes.data for segment in encoded.segments]
    assert addresses == [weights.ctypes.data, bias.data_ptr()]
    assert encoded.head == head_of("test/gradient", [7, ["weight", "bias"]], [["float32", 2, 3], ["bfloat16", 2]])
    head = decode_head(memoryview(encoded.head), max_message=LIMIT)
    assert head == Head(
        type=Gradient, kind="test/gradient", fields={"round": 7}, tensors={"tensors": ["weight", "bias"]},
        specs=[TensorSpec("float32", (2, 3)), TensorSpec("bfloat16", (2,))],
        codec=None, sizes=[24, 4], raw_size=28, wire_size=28,
    )  # fmt: skip
    buffers = [memoryview(bytearray(size)) for size in head.sizes]
    arrived = build(head, buffers)
    buffers[1][:] = encoded.segments[1]
    assert torch.equal(arrived.tensors["bias"].torch(), bias)


def test_fields_annotated_with_the_class_itself() -> None:
    tensor = Tensor(TensorSpec("uint8", (3,)), b"abc")
    assert transmit(OnlyTensors(tensor, [tensor, tensor])) == OnlyTensors(tensor, [tensor] * 2)


def test_messages_are_dataclasses_with_slots_and_defaults() -> None:
    sent = Plain(3)
    assert (sent.weight, sent.path) == (1.0, ())
    assert sent == Plain(round=3)
    assert sent != Plain(4)
    assert not hasattr(sent, "__dict__")
    assert kind_of(Plain) == "test/plain"
    with pytest.raises(TypeError):
        Plain()  # type: ignore[call-arg]


def test_messages_with_tensors_are_equal_by_bits() -> None:
    made = Gradient(1, {"a": np.array([np.nan])})
    assert made == Gradient(1, {"a": torch.tensor([math.nan], dtype=torch.float64)})
    assert made != Gradient(2, {"a": np.array([np.nan])})
    assert made != Gradient(1, {"a": np.array([1.0])})
    assert made != Gradient(1, {"b": np.array([np.nan])})
    assert made != Gradient(1, {"a": np.array([np.nan], np.float32)})
    assert made != object()


def test_a_class_may_bring_its_own_equality() -> None:
    @message("test/own-equality")
    class Own:
        tensor: TensorLike

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert Own(1) == 5


def test_values_of_similar_types_are_taken() -> None:
    class Colour(StrEnum):
        RED = "red"

    class Level(IntEnum):
        LOW = 1

    alike: dict[str, Any] = {
        "round": np.int32(5), "weight": np.float32(0.5), "name": Colour.RED, "data": bytearray(b"x"), "maybe": Level.LOW,
        "sizes": (1, np.uint8(2)), "table": {"a": [1, np.float64(2)]},
        "anything": [np.int8(3), np.float16(0.5), Colour.RED, bytearray(b"y"), (1, memoryview(b"z"))],
    }  # fmt: skip
    arrived = transmit(Plain(**alike))
    assert repr(arrived) == repr(
        Plain(
            round=5, weight=0.5, name="red", data=b"x", maybe=1, sizes=[1, 2], table={"a": [1.0, 2.0]},
            anything=[3, 0.5, "red", b"y", [1, b"z"]],
        )
    )  # fmt: skip


def test_a_message_without_fields() -> None:
    @message("test/empty")
    class Empty:
        pass

    assert encode(Empty()).head == head_of("test/empty", [], [])
    assert transmit(Empty()) == Empty()


# ------------------------------------------------------------------------------------------------------ decoration


@pytest.mark.parametrize("kind", ["", "Upper", "a b", "é", "x" * 65, "a\n"])
def test_kinds(kind: str) -> None:
    with pytest.raises(TypeError, match="kind is 1 to 64 characters"):
        message(kind)
    message("x" * 64)


@pytest.mark.parametrize(
    "annotation",
    [
        object, set[int], list, dict, tuple, complex, list[set[int]], dict[float, int], dict[str, object], int | str,
        int | str | None, np.ndarray, torch.Tensor, list[Tensor | None], dict[int, Tensor], tuple[Tensor, int],
        Callable[[], int], Literal["a"], Plain, list[Tensors], tuple[()], None | set[int], "Unknown",
    ],
)  # fmt: skip
def test_an_annotation_that_cannot_be_sent_is_refused_with_the_name_of_its_field(annotation: Any) -> None:
    bad = type("Bad", (), {"__annotations__": {"good": int, "bad_field": annotation}, "__module__": __name__})
    with pytest.raises(TypeError, match=r"test_codec\.Bad(\.bad_field: |: an annotation names .*unknown: .*Unknown)"):
        message("test/bad")(bad)
    with pytest.raises(MessageError, match="unknown kind 'test/bad'"):
        decode_head(head_of("test/bad", [], []), max_message=LIMIT)


def test_annotations_nested_too_deep() -> None:
    annotation: Any = int
    for _ in range(16):
        annotation = list[annotation]
    deep = {"__module__": __name__}
    message("test/deep")(type("Deep", (), {"__annotations__": {"x": annotation}, **deep}))
    with pytest.raises(TypeError, match="more than 16 containers"):
        message("test/deeper")(type("Deeper", (), {"__annotations__": {"x": list[annotation]}, **deep}))


def test_a_field_that_the_constructor_does_not_take() -> None:
    from dataclasses import field

    with pytest.raises(TypeError, match=r"Hidden\.x: .* must be in __init__"):

        @message("test/hidden")
        class Hidden:
            x: int = field(init=False, default=3)


def test_names_are_looked_up_where_the_class_stands() -> None:
    Count = int

    @message("test/local")
    class Local:
        count: Count  # type: ignore[valid-type]
        tensors: Tensors

    assert transmit(Local(3, {})).count == 3


def test_tensor_names_need_no_import_at_run_time() -> None:
    scope: dict[str, Any] = {"message": message, "__name__": "builtins"}
    code = "from __future__ import annotations\n@message('test/unimported')\nclass Made:\n  a: Tensor\n  b: Tensors | None = None"
    exec(code, scope)
    assert transmit(scope["Made"](b"ab")).a.shape == (2,)


def test_a_kind_belongs_to_one_class() -> None:
    def define() -> type:
        @message("test/again")
        class Again:
            x: int

        return Again

    first, second = define(), define()  # as when a module is loaded again
    assert type(transmit(first(1))) is type(transmit(second(1))) is second
    with pytest.raises(TypeError, match=r"Other: the kind 'test/again' is that of .*define\.<locals>\.Again"):

        @message("test/again")
        class Other:
            x: int


# --------------------------------------------------------------------------------------------------------- sending

UNSENDABLE: list[tuple[Any, str]] = [
    (Plain("3"), "test/plain.round: expected int, not str"),  # type: ignore[arg-type]
    (Plain(True), "test/plain.round: expected int, not bool"),
    (Plain(1.0), "test/plain.round: expected int, not float"),  # type: ignore[arg-type]
    (Plain(1 << 64), "test/plain.round: an int must fit in 64 bits"),
    (Plain(-(1 << 63) - 1), "test/plain.round: an int must fit in 64 bits"),
    (Plain(1, weight=False), "test/plain.weight: expected float, not bool"),
    (Plain(1, weight="1"), "test/plain.weight: expected float, not str"),  # type: ignore[arg-type]
    (Plain(1, weight=10**400), "test/plain.weight: the number is too large for a float"),
    (Plain(1, name=b"x"), "test/plain.name: expected str, not bytes"),  # type: ignore[arg-type]
    (Plain(1, name="\ud800"), "test/plain: 'utf-8' codec can't encode"),
    (Plain(1, ok=1), "test/plain.ok: expected bool, not int"),  # type: ignore[arg-type]
    (Plain(1, data="x"), "test/plain.data: expected bytes, not str"),  # type: ignore[arg-type]
    (Plain(1, nothing=0), "test/plain.nothing: expected None, not int"),  # type: ignore[arg-type]
    (Plain(1, maybe="x"), "test/plain.maybe: expected int, not str"),  # type: ignore[arg-type]
    (Plain(1, sizes="ab"), "test/plain.sizes: expected list, not str"),  # type: ignore[arg-type]
    (Plain(1, sizes=[1, None]), "test/plain.sizes[1]: expected int, not NoneType"),  # type: ignore[list-item]
    (Plain(1, path=(3,)), "test/plain.path[0]: expected str, not int"),  # type: ignore[arg-type]
    (Plain(1, pair=(1,)), "test/plain.pair: expected 2 items, not 1"),  # type: ignore[arg-type]
    (Plain(1, pair=("a", 1)), "test/plain.pair[0]: expected int, not str"),  # type: ignore[arg-type]
    (Plain(1, table=[1]), "test/plain.table: expected dict, not list"),  # type: ignore[arg-type]
    (Plain(1, table={"a": [1.0, "b"]}), "test/plain.table['a'][1]: expected float, not str"),  # type: ignore[list-item]
    (Plain(1, table={1: []}), "test/plain.table[1]: expected str, not int"),  # type: ignore[dict-item]
    (Plain(1, anything={"a": [object()]}), "test/plain.anything['a'][0]: expected plain data, not object"),
    (Plain(1, anything={1.5: 1}), "test/plain.anything[1.5]: expected a key of type str or int, not float"),
    (Plain(1, anything={1, 2}), "test/plain.anything: expected plain data, not set"),
    (Plain(1, anything=np.zeros(2)), "test/plain.anything: expected plain data, not numpy.ndarray"),
    (Gradient(1, None), "test/gradient.tensors: expected a map of tensors, not NoneType"),  # type: ignore[arg-type]
    (Gradient(1, [np.zeros(1)]), "test/gradient.tensors: expected a map of tensors, not list"),  # type: ignore[arg-type]
    (Gradient(1, {3: np.zeros(1)}), "test/gradient.tensors: expected str, not int"),  # type: ignore[dict-item]
    (Gradient(1, {"w": [1]}), "test/gradient.tensors['w']: list is no tensor"),
    (WithTensors(1, None), "test/tensors.one: NoneType is no tensor"),
    (WithTensors(1, b"", some=b"x"), "test/tensors.some: expected a list of tensors, not bytes"),  # type: ignore[arg-type]
    (WithTensors(1, b"", some=[b"x", 1]), "test/tensors.some[1]: int is no tensor"),
    (object(), "builtins.object is no message"),
]


@pytest.mark.parametrize(("sent", "fault"), UNSENDABLE, ids=[fault for _, fault in UNSENDABLE])
def test_a_wrong_value_is_refused_with_the_name_of_its_field(sent: Any, fault: str) -> None:
    with pytest.raises(MessageError, match="^" + re.escape(fault)):
        encode(sent)


def test_a_head_may_not_be_larger_than_its_limit() -> None:
    room = MAX_HEAD - len(encode(Plain(1, data=b"x" * 1000)).head) + 1000
    assert len(encode(Plain(1, data=b"x" * room)).head) == MAX_HEAD
    assert transmit(Plain(1, data=b"x" * room)).round == 1
    with pytest.raises(MessageTooLarge, match=r"test/plain: .* take 16385 bytes \(at most 16384\)"):
        encode(Plain(1, data=b"x" * (room + 1)))


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_is_limited_alike_on_both_sides() -> None:
    assert transmit(Plain(1, anything=nested(16))).anything == nested(16)
    with pytest.raises(MessageError, match=r"anything.*more than 16 lists and maps"):
        encode(Plain(1, anything=nested(17)))
    fields = [getattr(Plain(1), name) for name in Plain.__slots__]  # type: ignore[attr-defined]
    with pytest.raises(MessageError, match="message head: not readable as CBOR"):
        decode_head(head_of("test/plain", [*fields[:-1], nested(17)], []), max_message=LIMIT)


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
