"""Messages, and how to transmit them, for the tests of the codec."""

from __future__ import annotations

from typing import Any, ClassVar, Optional

import cbor2
from hypothesis import strategies as st

from p2pml.wire.codec import (
    Tensor,
    TensorLike,
    Tensors,
    build,
    decode_head,
    encode,
    message,
)

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


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


INTS = st.integers(-(1 << 63), (1 << 64) - 1)
FLOATS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = st.none() | st.booleans() | INTS | FLOATS | TEXT | st.binary(max_size=20)
DATA = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | INTS, inner, max_size=3), max_leaves=8
)
