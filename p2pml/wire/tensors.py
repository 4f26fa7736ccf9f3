"""Tensors as the wire sees them: a dtype name, a shape, and the bytes in little-endian C order.

Nothing here needs torch, and numpy is imported on first use. `export` finds the bytes of whatever a user has, without a
copy where its memory is already in wire order; `Tensor` is what arrives, and gives numpy or torch a view of the same
memory.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from p2pml.errors import MessageError, MissingExtra
from p2pml.wire.plain import type_name

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

MAX_DIMS = 64
"""Most dimensions of a tensor, as in numpy."""

_ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
_ONLY_TORCH = frozenset(name for name in _ITEMSIZE if name.startswith(("bfloat", "float8")) or name == "complex32")
_EMPTY = memoryview(b"")


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises `MessageError` for a name that is no dtype of the wire."""
    try:
        return _ITEMSIZE[dtype]
    except KeyError:
        raise MessageError(f"unknown dtype '{dtype}'") from None


class TensorSpec(NamedTuple):
    """What a tensor is without its bytes: the dtype's name as in torch and numpy, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements (1 for no dimensions)."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Tensor:
    """A received tensor: a spec over the memory that its bytes were received into.

    `data` is a one-dimensional memoryview of bytes, `spec.nbytes` long. Two tensors are equal if their specs and all
    their bits are: a NaN equals the same NaN, and 0.0 differs from -0.0. Raises `MessageError` if the memory does not
    fit the spec.
    """

    __slots__ = ("data", "spec")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, spec: TensorSpec, data: memoryview | bytes | bytearray) -> None:
        view = memoryview(data)
        if not view.c_contiguous:
            raise MessageError(f"the memory for a tensor {spec} is not contiguous")
        if view.nbytes != spec.nbytes:
            raise MessageError(f"a tensor {spec} has {spec.nbytes} bytes, not {view.nbytes}")
        self.spec = spec
        self.data = (view if view.format == "B" and view.ndim == 1 else view.cast("B")) if view.nbytes else _EMPTY

    @property
    def dtype(self) -> str:
        """The dtype's name, e.g. 'bfloat16'."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; ``()`` for a tensor without dimensions."""
        return self.spec.shape

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.data.nbytes

    def numpy(self) -> NDArray[Any]:
        """An array over the same memory. Raises `MessageError` for the dtypes that numpy lacks."""
        import numpy as np

        if self.dtype in _ONLY_TORCH:
            raise MessageError(f"numpy has no {self.dtype}: use .torch(), or view .data as integers")
        return np.ndarray(self.shape, np.dtype(self.dtype).newbyteorder("<"), self.data)

    def torch(self) -> torch.Tensor:
        """A torch tensor over the same memory, whatever its dtype; read-only memory is copied, as torch cannot protect
        it.

        Raises `MissingExtra` without torch, `MessageError` if the installed torch is too old for the dtype.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingExtra.of("torch", "torch", "Tensor.torch()") from error
        dtype = getattr(torch, self.dtype, None)
        if dtype is None:
            raise MessageError(f"torch {torch.__version__} has no {self.dtype}")
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        memory = bytearray(self.data) if self.data.readonly else self.data
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        import numpy as np

        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return self.spec == other.spec and self.data == other.data

    def __repr__(self) -> str:
        return f"<Tensor {self.spec}>"


def allocate(nbytes: int) -> memoryview:
    """Writable memory of `nbytes` bytes, not initialised, to receive into."""
    import numpy as np

    return np.empty(nbytes, np.uint8).data


def export(value: Any) -> tuple[TensorSpec, memoryview]:
    """The spec and the bytes of a tensor for sending: a `Tensor`, a numpy array or scalar, a torch tensor, or a buffer.

    The bytes are the value's own memory, a one-dimensional memoryview of format 'B' that keeps the value alive. Copied,
    once, are only values whose memory is not in wire order: not contiguous, big-endian, on another device than the CPU,
    lazily conjugated or negated. A torch tensor that requires a gradient is detached. Raises `MessageError` for what
    has no dtype of the wire (objects, text, dates, records, long double) or no plain memory (sparse, quantized, meta,
    nested).
    """
    if isinstance(value, Tensor):
        return value.spec, value.data
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if np is not None and isinstance(value, (np.ndarray, np.generic)):
        return _export_array(value)
    # Whoever has a torch tensor has imported torch; here it need not, and must not, be imported.
    if torch is not None and isinstance(value, torch.Tensor):
        return _export_torch(value)
    try:
        view = memoryview(value)
    except TypeError:
        raise MessageError(f"{type_name(value)} is no tensor: give a numpy array, a torch tensor or a buffer") from None
    return _export_array(view)


def _export_array(value: Any) -> tuple[TensorSpec, memoryview]:
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise MessageError("a masked array cannot be sent: fill it, or send data and mask")
    try:
        array = np.asarray(value)
    except (ValueError, NotImplementedError) as error:
        raise MessageError(f"{type_name(value)} has no format that can be sent: {error}") from error
    name, wire = _wire_dtype(array.dtype)
    if not name:
        raise MessageError(f"a numpy array of dtype {array.dtype} cannot be sent")
    array = np.asarray(array, wire, order="C")
    return TensorSpec(name, array.shape), array.reshape(-1).view(np.uint8).data if array.size else _EMPTY


@lru_cache(maxsize=128)
def _wire_dtype(dtype: Any) -> tuple[str, Any]:
    """The wire's name of a numpy dtype ('' if it has none), and the dtype in the wire's byte order."""
    name = dtype.name if dtype.name in _ITEMSIZE else ""
    return name, dtype.newbyteorder("<") if dtype.str.startswith(">") else dtype


def _export_torch(value: torch.Tensor) -> tuple[TensorSpec, memoryview]:
    import torch

    name = _torch_name(value.dtype)
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        what = "nested" if value.is_nested else "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
        raise MessageError(f"a {what} torch tensor has no plain memory that could be sent")
    if name not in _ITEMSIZE:
        raise MessageError(f"a torch tensor of dtype {name} cannot be sent")
    if value.ndim > MAX_DIMS:
        raise MessageError(f"a tensor of {value.ndim} dimensions cannot be sent: at most {MAX_DIMS}")
    spec = TensorSpec(name, tuple(value.shape))
    if not value.numel():
        return spec, _EMPTY
    tensor = value.detach()
    if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    # Not reshape(-1): of one element with a stride of its own, which counts as contiguous, that is no view of bytes.
    return spec, tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


@lru_cache(maxsize=128)
def _torch_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
