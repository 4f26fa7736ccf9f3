"""Models of many dtypes for tests, and what their average must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from p2pml.wire.tensors import Tensor, TensorSpec

Model = dict[str, Any]

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "conv.weight": ("float32", (5, 3, 3)),
    "norm.weight": ("float32", (5,)),
    "norm.running_mean": ("float32", (5,)),
    "norm.num_batches_tracked": ("int64", ()),
    "empty": ("float32", (0, 4)),
    "mask": ("bool", (7,)),
    "phase": ("complex64", (3, 2)),
    "precise": ("float64", (11,)),
    "half": ("float16", (13,)),
    "brain": ("bfloat16", (9,)),
    "counts": ("uint8", (6,)),
}


def make_model(seed: int, shapes: Mapping[str, tuple[str, tuple[int, ...]]] = SHAPES) -> Model:
    """A model of random tensors; those of bfloat16, which numpy lacks, as `Tensor`s over memory that can be written."""
    rng = np.random.default_rng(seed)
    return {name: _random(rng, dtype, shape) for name, (dtype, shape) in shapes.items()}


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    values = rng.normal(size=shape) * 3.0
    if dtype == "bfloat16":
        upper = (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")
        return Tensor(TensorSpec(dtype, shape), upper.reshape(-1).view(np.uint8).data)
    if dtype == "bool":
        return values > 0
    if dtype.startswith("complex"):
        return (values + 1j * rng.normal(size=shape)).astype(dtype)
    if dtype.startswith("float"):
        return np.asarray(values, dtype)
    return np.asarray(rng.integers(0, 200, shape), dtype)


def as_float64(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor's values as float64 or complex128."""
    if isinstance(tensor, Tensor) and tensor.dtype == "bfloat16":
        bits = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return bits.view("<f4").astype(np.float64).reshape(tensor.shape)
    array = np.asarray(tensor)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def bits(model: Mapping[str, Any]) -> dict[str, bytes]:
    """All bits of a model, to compare peers by."""
    return {name: bytes(t.data) if isinstance(t, Tensor) else np.asarray(t).tobytes() for name, t in model.items()}


def copy(model: Mapping[str, Any]) -> Model:
    """The same tensors in memory of their own."""
    return {
        name: Tensor(t.spec, bytearray(t.data)) if isinstance(t, Tensor) else np.array(t) for name, t in model.items()
    }


def assert_is_mean(result: Mapping[str, Any], models: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> None:
    """`result` is the weighted mean of `models`, computed in float64, to the rounding of each dtype."""
    total = sum(weights)
    hops = len(models)
    for name, tensor in result.items():
        values = [as_float64(model[name]) for model in models]
        mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / total
        largest = max((np.abs(value).max(initial=0.0) for value in values), default=0.0)
        dtype = tensor.dtype if isinstance(tensor, Tensor) else np.asarray(tensor).dtype.name
        found = as_float64(tensor)
        assert found.shape == mean.shape
        if dtype == "bool":
            sure = np.abs(mean - 0.5) > 1e-9
            assert (found[sure] == (mean[sure] >= 0.5)).all(), name
        elif dtype.startswith(("int", "uint")):
            assert (np.abs(found - mean) <= 0.5 + 1e-9).all(), name
        else:
            epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float64": 2.0**-53}.get(dtype, 2.0**-24)
            assert np.abs(found - mean).max(initial=0.0) <= (hops + 2) * epsilon * largest, name
