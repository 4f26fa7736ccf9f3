"""Typed messages to a CBOR head and raw tensor segments, and back.

A message is a class::

    @message("gradient")
    class Gradient:
        round: int
        weight: float
        tensors: Tensors

Its head is the CBOR array ``[kind, [fields in declared order], [[dtype, *shape], ...]]``, for a compressed message
followed by ``codec, [wire sizes]``. In the place of a field of tensors stands null (absent), true (one), a count (a
list) or a list of names (a map); their specs, and their bytes after the head, come in the order of the fields.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from p2pml.errors import MessageError, MessageTooLarge
from p2pml.wire.compression import CODECS, check_ratio
from p2pml.wire.fields import Field, TensorLike, Tensors, compile_field
from p2pml.wire.plain import MAX_DEPTH, MAX_HEAD, Mismatch, plain_dumps, plain_loads, read, write
from p2pml.wire.tensors import MAX_DIMS, Tensor, TensorSpec, export, itemsize

__all__ = [
    "MAX_HEAD", "Encoded", "Head", "Tensor", "TensorLike", "Tensors",
    "build", "decode_head", "encode", "kind_of", "message", "plain_dumps", "plain_loads",
]  # fmt: skip

T = TypeVar("T")
_KIND = re.compile(r"[a-z0-9._/-]{1,64}")
_HEAD, _COMPRESSED_HEAD, _NO_ITEMS = b"\x83", b"\x85", b"\x80"  # arrays of three, of five, of none


class _Layout:
    """A message class, compiled."""

    __slots__ = ("cls", "fields", "kind", "prefix", "values")

    def __init__(self, kind: str, cls: type, compiled: Sequence[Field]) -> None:
        self.kind, self.cls, self.fields = kind, cls, tuple(compiled)
        self.prefix = _HEAD + write(kind, kind)
        names = [field.name for field in compiled]
        # Of fewer than two names attrgetter would give no tuple: two more are asked for, and `encode` does not look at
        # them.
        self.values: Callable[[Any], tuple[Any, ...]] = attrgetter(*names, "__class__", "__class__")


_by_kind: dict[str, _Layout] = {}
_by_class: dict[type, _Layout] = {}


@dataclass_transform()
def message(kind: str) -> Callable[[type[T]], type[T]]:
    """Make a class with annotated fields a message: a dataclass with slots, known to both ends by its `kind`.

    A kind is 1 to 64 of the characters a-z 0-9 . _ / -, and the same on all peers. Fields are int (64 bits), float,
    str, bool, bytes, None, `list`, `tuple`, `dict` (with keys str or int) of these, Any (plain data, checked when it is
    sent), `X | None`; and tensors: `TensorLike` or `Tensor` (one), ``list[Tensor]``, `Tensors` (a map), each ``|
    None``. They may have defaults.

    Messages with tensors are equal if their tensors are bit for bit. Raises `TypeError`, naming the field, for any
    other annotation, and for a kind that another class has.
    """
    if not _KIND.fullmatch(kind):
        raise TypeError(f"a message's kind is 1 to 64 characters of a-z 0-9 . _ / -, not {kind!r}")

    def decorate(cls: type[T]) -> type[T]:
        other = _by_kind.get(kind)
        if other is not None and _origin(other.cls) != _origin(cls):
            raise TypeError(f"{_origin(cls)}: the kind '{kind}' is that of {_origin(other.cls)}")
        own_equality = "__eq__" in vars(cls)
        made = dataclass(slots=True)(cls)
        compiled = _compile_fields(made, sys._getframe(1).f_locals)
        if any(field.tensors for field in compiled) and not own_equality:
            made.__eq__ = _equal  # type: ignore[method-assign]
        _by_kind[kind] = _by_class[made] = _Layout(kind, made, compiled)
        return made

    return decorate


def kind_of(cls: type) -> str:
    """The kind of a message class. Raises `MessageError` for another."""
    return _layout(cls).kind


def _layout(cls: type) -> _Layout:
    layout = _by_class.get(cls)
    if layout is None:
        raise MessageError(f"{cls.__module__}.{cls.__qualname__} is no message: decorate it with @message(kind)")
    return layout


def _origin(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _compile_fields(cls: type, scope: Mapping[str, Any]) -> list[Field]:
    # Names as Python sees them where the class stands; those of this module serve who imports them for type checking
    # only.
    names = {"Any": Any, "Tensor": Tensor, "TensorLike": TensorLike, "Tensors": Tensors}
    names |= {**vars(sys.modules[cls.__module__]), **scope}
    try:
        hints = get_type_hints(cls, localns=names)
    except NameError as error:
        raise TypeError(f"{_origin(cls)}: an annotation names something unknown: {error}") from error
    compiled = []
    for field in fields(cls):
        if not field.init:
            raise TypeError(f"{_origin(cls)}.{field.name}: a message's field must be in __init__")
        try:
            compiled.append(compile_field(field.name, hints[field.name]))
        except TypeError as error:
            raise TypeError(f"{_origin(cls)}.{field.name}: {error}") from error
    return compiled


def _equal(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    mine, others = encode(self), encode(other)
    return (mine.head, mine.segments) == (others.head, others.segments)


# -------------------------------------------------------------------------------------------------------- sending


@dataclass(slots=True)
class Encoded:
    """A message ready for the wire. `segments` are the memory of its tensors; `specs` describes them, `codec` packed
    them."""

    head: bytes
    segments: list[memoryview]
    specs: list[TensorSpec]
    codec: str | None = None

    @property
    def size(self) -> int:
        """Bytes on the wire: the head and all segments."""
        return len(self.head) + sum(map(len, self.segments))

    def packed(self, codec: str, segments: list[memoryview]) -> Encoded:
        """The same message with `segments` compressed by `codec`. A segment as long as its tensor is taken as it is.

        Raises `MessageTooLarge` if the wire sizes make the head too long.
        """
        sizes = [len(segment) for segment in segments]
        what = "a compressed message"
        head = _COMPRESSED_HEAD + self.head[1:] + write(codec, what) + write(sizes, what)
        _check_head(head, what)
        return Encoded(head, segments, self.specs, codec)


def encode(message: Any) -> Encoded:
    """The head and the segments of a message; tensors are not copied where their memory is in wire order (see
    `export`).

    Raises `MessageError` naming the field whose value is not of its type, `MessageTooLarge` if the head exceeds
    `MAX_HEAD`.
    """
    layout = _layout(type(message))
    segments: list[memoryview] = []
    specs: list[TensorSpec] = []
    plain: list[Any] = []
    for (name, convert, tensors, optional), value in zip(layout.fields, layout.values(message), strict=False):
        try:
            if tensors is None:
                plain.append(convert(value))
            elif value is None and optional:
                plain.append(None)
            else:
                stand_in, found = tensors.split(value)
                plain.append(stand_in)
                for step, tensor in found:
                    spec, segment = _export(step, tensor)
                    specs.append(spec)
                    segments.append(segment)
        except Mismatch as wrong:
            raise MessageError(f"{layout.kind}.{name}{wrong}") from None
    described = write([[dtype, *shape] for dtype, shape in specs], layout.kind) if specs else _NO_ITEMS
    head = layout.prefix + write(plain, layout.kind) + described
    _check_head(head, layout.kind)
    return Encoded(head, segments, specs)


def _export(step: str, tensor: Any) -> tuple[TensorSpec, memoryview]:
    try:
        return export(tensor)
    except MessageError as error:
        raise Mismatch(str(error), step) from error


def _check_head(head: bytes, what: str) -> None:
    if len(head) > MAX_HEAD:
        raise MessageTooLarge(f"{what}: its fields and shapes take {len(head)} bytes (at most {MAX_HEAD}): use tensors")


# ------------------------------------------------------------------------------------------------------ receiving


@dataclass(slots=True)
class Head:
    """What is known of a message before its tensors come.

    fields: the plain fields. tensors: for each field of tensors what stands for them in the head. specs: of all
    tensors, in order. codec: what they are compressed with, or None. sizes: the bytes of each on the wire; one whose
    wire size is that of its spec is not compressed. raw_size, wire_size: the sums of bytes of the tensors, and of their
    segments.
    """

    type: type
    kind: str
    fields: dict[str, Any]
    tensors: dict[str, Any]
    specs: list[TensorSpec]
    codec: str | None
    sizes: list[int]
    raw_size: int
    wire_size: int


def decode_head(data: bytes | memoryview, *, max_message: int) -> Head:
    """Read and check a head, before any memory is taken for what it announces.

    `max_message` limits head and tensors together, in bytes, uncompressed. Raises `MessageTooLarge` beyond it and
    `MessageError` for all else that is wrong, naming kind and field where they are known.
    """
    # Two more: the head, and the list of its fields.
    top = read(data, "message head", depth=MAX_DEPTH + 2)
    if type(top) is not list or len(top) not in (3, 5):
        raise MessageError("message head: not [kind, fields, specs] or [kind, fields, specs, codec, sizes]")
    kind, values, described = top[:3]
    layout = _by_kind.get(kind) if type(kind) is str else None
    if layout is None:
        raise MessageError(f"message head: unknown kind {kind!r:.80}")
    if type(values) is not list or len(values) != len(layout.fields):
        raise MessageError(f"{kind}: expected a list of {len(layout.fields)} fields: {', '.join(_names(layout))}")
    plain: dict[str, Any] = {}
    stand_ins: dict[str, Any] = {}
    count = 0
    for (name, convert, tensors, optional), value in zip(layout.fields, values, strict=True):
        try:
            if tensors is None:
                plain[name] = convert(value)
            else:
                stand_ins[name] = value
                count += 0 if value is None and optional else tensors.count(value)
        except Mismatch as wrong:
            raise MessageError(f"{kind}.{name}{wrong}") from None
    if type(described) is not list or len(described) != count:
        raise MessageError(f"{kind}: its fields have {count} tensors, but not as many are described")
    if len(top) == 3 and not count and len(data) <= max_message:
        return Head(layout.cls, kind, plain, stand_ins, [], None, [], 0, 0)
    specs = [_read_spec(kind, item) for item in described]
    raw = [spec.nbytes for spec in specs]
    raw_size = sum(raw)
    if raw_size + len(data) > max_message:
        raise MessageTooLarge(f"{kind}: {raw_size + len(data)} bytes (at most {max_message})")
    codec, sizes = _read_sizes(kind, top[3], top[4], raw) if len(top) == 5 else (None, raw)
    return Head(layout.cls, kind, plain, stand_ins, specs, codec, sizes, raw_size, sum(sizes))


def _names(layout: _Layout) -> Iterator[str]:
    return (field.name for field in layout.fields)


def _read_spec(kind: str, item: Any) -> TensorSpec:
    if type(item) is not list or not item or type(item[0]) is not str:
        raise MessageError(f"{kind}: a tensor is described as [dtype, *shape], not by {item!r:.80}")
    dtype, *shape = item
    if len(shape) > MAX_DIMS:
        raise MessageError(f"{kind}: a tensor of {len(shape)} dimensions (at most {MAX_DIMS})")
    if not all(type(dim) is int and dim >= 0 for dim in shape):
        raise MessageError(f"{kind}: the shape {shape!r:.80} has something that is no dimension")
    try:
        # Also for an empty tensor: numpy refuses one whose other dimensions are too large.
        size = prod(dim or 1 for dim in shape) * itemsize(dtype)
    except MessageError as error:
        raise MessageError(f"{kind}: {error}") from None
    if size >= 1 << 63:
        raise MessageError(f"{kind}: a tensor {dtype}{shape!r:.80} is larger than any memory")
    return TensorSpec(dtype, tuple(shape))


def _read_sizes(kind: str, codec: Any, sizes: Any, raw: list[int]) -> tuple[str, list[int]]:
    if type(codec) is not str or codec not in CODECS:
        raise MessageError(f"{kind}: unknown compression {codec!r:.80}")
    if type(sizes) is not list or len(sizes) != len(raw) or not all(type(size) is int for size in sizes):
        raise MessageError(f"{kind}: expected a list of {len(raw)} sizes of compressed tensors")
    for size, full in zip(sizes, raw, strict=True):
        if not 0 <= size <= full:
            raise MessageError(f"{kind}: {size} compressed bytes for a tensor of {full}")
        check_ratio(codec, size, full)
    return codec, sizes


def build(head: Head, buffers: Sequence[memoryview]) -> Any:
    """The message of a head, its tensors over `buffers`: one for each, uncompressed, which belong to the message from
    now on.

    Raises `MessageError` if the buffers don't fit the specs, and if the class itself refuses the values (`ValueError`
    or `TypeError` from its ``__post_init__``).
    """
    if len(buffers) != len(head.specs):
        raise MessageError(f"{head.kind}: {len(buffers)} buffers for {len(head.specs)} tensors")
    values = head.fields
    if head.tensors:
        try:
            tensors = iter([Tensor(spec, buffer) for spec, buffer in zip(head.specs, buffers, strict=True)])
        except MessageError as error:
            raise MessageError(f"{head.kind}: {error}") from error
        values = dict(values)
        for name, _, kind, _ in _by_class[head.type].fields:
            if kind is not None:
                stand_in = head.tensors[name]
                values[name] = None if stand_in is None else kind.join(stand_in, tensors)
    try:
        return head.type(**values)
    except (ValueError, TypeError) as error:
        raise MessageError(f"{head.kind}: {error}") from error
