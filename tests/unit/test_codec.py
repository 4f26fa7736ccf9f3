from __future__ import annotations

import math
import re
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pml.errors import MessageError, MessageTooLarge
from p2pml.wire.codec import (
    MAX_HEAD,
    Head,
    Tensor,
    TensorLike,
    Tensors,
    build,
    decode_head,
    encode,
    kind_of,
    message,
)
from p2pml.wire.tensors import TensorSpec
from tests.unit.messages import (
    DATA,
    FLOATS,
    INTS,
    LIMIT,
    TEXT,
    Gradient,
    OnlyTensors,
    Plain,
    WithTensors,
    head_of,
    nested,
    transmit,
)

# ----------------------------------------------------------------------------------------------------- round trips


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


def test_nesting_is_limited_alike_on_both_sides() -> None:
    assert transmit(Plain(1, anything=nested(16))).anything == nested(16)
    with pytest.raises(MessageError, match=r"anything.*more than 16 lists and maps"):
        encode(Plain(1, anything=nested(17)))
    fields = [getattr(Plain(1), name) for name in Plain.__slots__]  # type: ignore[attr-defined]
    with pytest.raises(MessageError, match="message head: not readable as CBOR"):
        decode_head(head_of("test/plain", [*fields[:-1], nested(17)], []), max_message=LIMIT)
