"""A model as segments: equal stretches of its tensors' elements, which travel, are combined and are forwarded one by
one.

A `SegmentMap` says which elements of which tensors a segment has. It follows from the tensors' names, dtypes and shapes
alone, so that peers with equal models have equal maps. `BoundTensors` ties a map to the tensors of one model, whose
memory is used where it is: nothing flattens a model as a whole. How segments are added up is the matter of
`p2pml.protocols.training.merge`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from p2pml.protocols.training.errors import ModelMismatch
from p2pml.wire.tensors import Tensor, TensorSpec, export

Array = NDArray[Any]
SEGMENT_BYTES = 1 << 20
"""Bytes of a segment on the wire; the last of a group is shorter."""


class Group(NamedTuple):
    """Tensors that travel together: those whose elements are added up as the same dtype."""

    wire: str
    stored: np.dtype[Any]

    @property
    def is_mean(self) -> bool:
        """Whether segments hold weighted means; otherwise weighted sums (see `merge`)."""
        return self.wire in ("float16", "bfloat16")


_FLOAT32, _FLOAT64 = Group("float32", np.dtype("<f4")), Group("float64", np.dtype("<f8"))
_FLOAT16, _BFLOAT16 = Group("float16", np.dtype("<f2")), Group("bfloat16", np.dtype("<u2"))
_GROUPS = {
    "float32": _FLOAT32, "complex64": _FLOAT32, "float64": _FLOAT64, "complex128": _FLOAT64,
    "float16": _FLOAT16, "complex32": _FLOAT16, "bfloat16": _BFLOAT16,
    **dict.fromkeys(["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"], _FLOAT64),
}  # fmt: skip


class Piece(NamedTuple):
    """Elements `start` to `stop` of a tensor, flat, which stand in a segment from `offset` on.

    Complex ones count twice.
    """

    tensor: int
    start: int
    stop: int
    offset: int


class Segment(NamedTuple):
    """Elements `start` to `stop` of a group, and the pieces of tensors that they are.

    discrete: where in it integers and booleans stand, with their dtype. spec: how it looks on the wire.
    """

    group: Group
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    discrete: tuple[tuple[slice, str], ...]
    spec: TensorSpec

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


class SegmentMap:
    """The segments of a model whose tensors are described by `specs`, in that order, of `segment_bytes` each.

    A model of nothing has one segment, which is empty. Raises `ModelMismatch` for a dtype that cannot be averaged.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], segment_bytes: int = SEGMENT_BYTES) -> None:
        if segment_bytes < 8:
            raise ValueError(f"a segment of {segment_bytes} bytes does not hold an element")
        self.names = list(specs)
        self.specs = list(specs.values())
        self.segment_bytes = segment_bytes
        self.groups: dict[Group, int] = {}  # with their numbers of elements
        members: dict[Group, list[tuple[int, int]]] = {}
        for index, (name, spec) in enumerate(specs.items()):
            group = _GROUPS.get(spec.dtype)
            if group is None:
                raise ModelMismatch(f"{name}: a tensor of dtype {spec.dtype} cannot be averaged")
            size = spec.size * (2 if spec.dtype.startswith("complex") else 1)
            members.setdefault(group, []).append((index, size))
            self.groups[group] = self.groups.get(group, 0) + size
        self.offsets: list[tuple[Group, int]] = [(_FLOAT32, 0)] * len(
            self.specs
        )  # where each tensor begins in its group
        self.segments = [segment for group in self.groups for segment in self._cut(group, members[group])]
        if not self.segments:
            self.groups, self.segments = {_FLOAT32: 0}, [Segment(_FLOAT32, 0, 0, (), (), TensorSpec("float32", (0,)))]

    def _cut(self, group: Group, members: Sequence[tuple[int, int]]) -> list[Segment]:
        length = self.segment_bytes // group.stored.itemsize
        pieces: list[list[Piece]] = [[] for _ in range(-(-self.groups[group] // length))]
        position = 0
        for index, size in members:
            self.offsets[index] = (group, position)
            done = 0
            while done < size:
                number, offset = divmod(position, length)
                count = min(size - done, length - offset)
                pieces[number].append(Piece(index, done, done + count, offset))
                done, position = done + count, position + count
        segments = []
        for at, found in enumerate(pieces):
            start, stop = at * length, min((at + 1) * length, position)
            spec = TensorSpec(group.wire, (stop - start,))
            segments.append(Segment(group, start, stop, tuple(found), tuple(self._discrete(found)), spec))
        return segments

    def _discrete(self, pieces: Sequence[Piece]) -> Iterator[tuple[slice, str]]:
        for tensor, start, stop, offset in pieces:
            dtype = self.specs[tensor].dtype
            if dtype.startswith(("int", "uint", "bool")):
                yield slice(offset, offset + stop - start), dtype

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes that all segments take on the wire."""
        return sum(size * group.stored.itemsize for group, size in self.groups.items())

    def name(self, index: int, element: int) -> str:
        """What element `element` of segment `index` is, for errors: e.g. 'conv1.weight[7]'."""
        piece = next(
            piece for piece in self.segments[index].pieces if element < piece.offset + piece.stop - piece.start
        )
        position = piece.start + element - piece.offset
        half = 2 if self.specs[piece.tensor].dtype.startswith("complex") else 1
        return f"{self.names[piece.tensor]}[{position // half}]"

    @property
    def signature(self) -> list[list[Any]]:
        """See `signature`."""
        return signature(dict(zip(self.names, self.specs, strict=True)))


class BoundTensors:
    """The tensors of one model (numpy arrays, torch tensors, or buffers) under a `SegmentMap` made for their specs.

    Tensors whose memory is not in wire order (not contiguous, on another device) are copied once, here, and written
    back by `flush`. Raises `ModelMismatch`, naming the first, if the tensors are not those that the map was made for.
    """

    def __init__(self, segments: SegmentMap, tensors: Mapping[str, Any]) -> None:
        exported = {name: export(tensor) for name, tensor in tensors.items()}
        specs = {name: spec for name, (spec, _) in exported.items()}
        check_same(segments.signature, signature(specs), "these tensors")
        self.segments = segments
        self._flat: list[Array] = []  # one dimension each; complex numbers as pairs
        self._copied: list[tuple[Any, TensorSpec, Array]] = []
        for tensor, (spec, memory) in zip(tensors.values(), exported.values(), strict=True):
            flat = _flat(spec, memory)
            self._flat.append(flat)
            if spec.size and not _is_own_memory(tensor, flat):
                self._copied.append((tensor, spec, flat))
        self._parts: list[list[tuple[Array, slice]] | None] = [None] * len(segments)

    @classmethod
    def of(cls, tensors: Mapping[str, Any], segment_bytes: int = SEGMENT_BYTES) -> BoundTensors:
        """Bound to a map of their own."""
        return cls(SegmentMap(specs_of(tensors), segment_bytes), tensors)

    def parts(self, index: int) -> list[tuple[Array, slice]]:
        """Of segment `index`: the elements of each tensor in it, in its own dtype and memory, and where they stand in
        it.
        """
        parts = self._parts[index]
        if parts is None:
            parts = self._parts[index] = [
                (self._flat[tensor][start:stop], slice(offset, offset + stop - start))
                for tensor, start, stop, offset in self.segments.segments[index].pieces
            ]
        return parts

    def view(self, index: int) -> Array | None:
        """Segment `index` as it would be on the wire, without a copy; None unless it is one tensor's memory."""
        parts = self.parts(index)
        if len(parts) != 1 or parts[0][0].dtype != self.segments.segments[index].group.stored:
            return None
        return parts[0][0]

    def scatter(self, index: int, data: Array) -> None:
        """Write a finished segment into the tensors.

        Integers and booleans must be whole by now (`merge` rounds them).
        """
        for own, where in self.parts(index):
            np.copyto(own, data[where], casting="unsafe")

    def refresh(self) -> None:
        """Copy anew what had to be copied: the tensors have other values now."""
        for tensor, spec, flat in self._copied:
            np.copyto(flat, _flat(spec, export(tensor)[1]))

    def flush(self) -> None:
        """After the last `scatter`: write copies back into the tensors that they were made of."""
        for tensor, spec, flat in self._copied:
            done = Tensor(spec, flat.view(np.uint8).data)
            if hasattr(tensor, "copy_"):
                tensor.detach().copy_(done.torch())
            else:
                np.copyto(_as_array(tensor), done.numpy())

    def require_writable(self) -> None:
        """Raise `ModelMismatch`, naming the first, if a tensor cannot take a result."""
        originals = {id(flat): tensor for tensor, _, flat in self._copied}
        for name, flat in zip(self.segments.names, self._flat, strict=True):
            tensor = originals.get(id(flat), flat)
            if not (hasattr(tensor, "copy_") or _as_array(tensor).flags.writeable):
                raise ModelMismatch(f"{name}: its memory is read-only, so it cannot take the average")


def specs_of(tensors: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The dtypes and shapes of tensors. Raises `MessageError` for what is no tensor."""
    return {name: export(tensor)[0] for name, tensor in tensors.items()}


def signature(specs: Mapping[str, TensorSpec]) -> list[list[Any]]:
    """``[name, dtype, shape]`` for each tensor, as in `p2pml.protocols.training.tensors.signature`."""
    return [[name, spec.dtype, list(spec.shape)] for name, spec in specs.items()]


def check_same(mine: Sequence[Any], theirs: Sequence[Any], whose: str, owner: str = "the group") -> None:
    """Raise `ModelMismatch`, naming the first tensor that differs and both sides of it, unless two signatures are
    equal.

    `theirs` may come from the wire: one that is no signature at all is refused like one that differs. This is
    `p2pml.protocols.training.tensors.compare_signatures` for programs without torch.
    """
    if not isinstance(theirs, list):
        raise ModelMismatch(f"{whose} is described by something that is no signature of a model")
    for position in range(max(len(mine), len(theirs))):
        own, other = (side[position] if position < len(side) else None for side in (mine, theirs))
        if own != other:
            raise ModelMismatch(f"{_describe(own)} in {owner}, but {_describe(other)} in {whose}")


def _describe(entry: Any) -> str:
    if entry is None:
        return "no further tensor"
    if not isinstance(entry, list) or len(entry) != 3:
        return "something that is no tensor's description"
    return f"{entry[0]!s:.200}: {entry[1]!s:.40}{entry[2]!s:.200}"


def _flat(spec: TensorSpec, memory: memoryview) -> Array:
    stored = _GROUPS[spec.dtype].stored if spec.dtype.startswith(("complex", "bfloat")) else np.dtype(spec.dtype)
    size = spec.nbytes // stored.itemsize
    return np.frombuffer(memory, stored) if size else np.empty(0, stored)


def _is_own_memory(tensor: Any, flat: Array) -> bool:
    """Whether `flat` is the memory of the tensor itself, and no copy that `export` made."""
    if isinstance(tensor, Tensor):
        return True
    own = tensor.data_ptr() if hasattr(tensor, "data_ptr") else _as_array(tensor).__array_interface__["data"][0]
    return bool(own == flat.__array_interface__["data"][0])


def _as_array(value: Any) -> Array:
    return value if isinstance(value, np.ndarray) else np.asarray(memoryview(value))
