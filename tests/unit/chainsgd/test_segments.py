from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pml.protocols.training.errors import ModelMismatch
from p2pml.protocols.training.segments import BoundTensors, SegmentMap, check_same, specs_of
from p2pml.wire.tensors import TensorSpec
from tests.unit.chainsgd.models import SHAPES, bits, copy, make_model

SPECS = {name: TensorSpec(dtype, shape) for name, (dtype, shape) in SHAPES.items()}


def gather(bound: BoundTensors, index: int) -> np.ndarray[Any, Any]:
    segment = bound.segments.segments[index]
    collected = np.empty(segment.size, segment.group.stored)
    for own, where in bound.parts(index):
        collected[where] = own
    return collected


@given(seed=st.integers(0, 99), segment_bytes=st.integers(8, 300))
def test_what_is_gathered_and_scattered_again_is_the_same_model(seed: int, segment_bytes: int) -> None:
    model, other = make_model(seed), make_model(seed + 1)
    source = BoundTensors.of(model, segment_bytes)
    target = BoundTensors.of(other, segment_bytes)
    for index in range(len(source.segments)):
        target.scatter(index, gather(source, index))
    assert bits(other) == bits(model)


@given(segment_bytes=st.integers(8, 400))
def test_segments_cover_every_element_once_and_are_full(segment_bytes: int) -> None:
    segments = SegmentMap(SPECS, segment_bytes)
    seen: dict[int, list[int]] = {}
    for segment in segments.segments:
        assert sum(piece.stop - piece.start for piece in segment.pieces) == segment.size
        assert segment.spec.nbytes <= segment_bytes
        for tensor, start, stop, _ in segment.pieces:
            seen.setdefault(tensor, []).extend(range(start, stop))
    for index, spec in enumerate(SPECS.values()):
        assert seen.get(index, []) == list(range(spec.size * (2 if spec.dtype == "complex64" else 1)))
    for group, size in segments.groups.items():
        sizes = [segment.size for segment in segments.segments if segment.group == group]
        assert sum(sizes) == size
        assert all(count == segment_bytes // group.stored.itemsize for count in sizes[:-1])


def test_equal_models_have_equal_maps_on_all_peers() -> None:
    assert SegmentMap(SPECS, 64).segments == SegmentMap(dict(SPECS), 64).segments


def test_two_byte_types_travel_in_two_bytes() -> None:
    specs = {"h": TensorSpec("float16", (100,)), "b": TensorSpec("bfloat16", (50,))}
    assert SegmentMap(specs).nbytes == 300


def test_a_model_of_nothing_has_one_empty_segment() -> None:
    for specs in ({}, {"nothing": TensorSpec("float32", (0, 3))}):
        segments = SegmentMap(specs)
        assert [segment.spec for segment in segments.segments] == [TensorSpec("float32", (0,))]


def test_a_segment_of_one_tensor_is_its_own_memory() -> None:
    weight = np.arange(1000, dtype=np.float32)
    bound = BoundTensors.of({"weight": weight}, 1000)
    view = bound.view(2)
    assert view is not None
    assert np.shares_memory(view, weight)
    assert view.tolist() == list(range(500, 750))


def test_segments_of_several_tensors_or_other_precision_have_no_view() -> None:
    bound = BoundTensors.of({"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32), "n": np.zeros(3, np.int64)})
    assert [bound.view(index) for index in range(len(bound.segments))] == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_torch_tensors_are_written_in_place_even_if_not_contiguous(dtype: torch.dtype) -> None:
    source = torch.arange(12).reshape(3, 4).to(dtype)
    base = torch.zeros(4, 3, dtype=dtype, requires_grad=dtype == torch.float32)
    target = {"plain": torch.zeros(3, 4, dtype=dtype), "turned": base.T}
    bound = BoundTensors.of(target, 16)
    bound.require_writable()
    reading = BoundTensors(bound.segments, {"plain": source, "turned": source})
    for index in range(len(bound.segments)):
        bound.scatter(index, gather(reading, index))
    bound.flush()
    assert torch.equal(target["plain"], source)
    assert torch.equal(base.detach().T, source)


def test_numpy_arrays_are_written_in_place_even_if_strided_or_big_endian() -> None:
    base = np.zeros((6, 8), np.float32)
    target = {"strided": base[::2, ::2], "reversed": base[1, ::-1], "big": np.zeros(5, ">f8")}
    values = {name: np.random.default_rng(1).normal(size=array.shape).astype("=f4") for name, array in target.items()}
    values["big"] = np.arange(5.0)
    bound = BoundTensors.of(target, 16)
    bound.require_writable()
    reading = BoundTensors(bound.segments, values)
    for index in range(len(bound.segments)):
        bound.scatter(index, gather(reading, index))
    bound.flush()
    for name, array in target.items():
        assert np.array_equal(array, values[name]), name
    assert np.count_nonzero(base[3]) == 0


def test_bound_to_memory_without_a_copy() -> None:
    model = copy(make_model(1))
    bound = BoundTensors.of(model, 64)
    model["precise"][...] = 7.0
    assert sum(np.count_nonzero(gather(bound, index) == 7.0) for index in range(len(bound.segments))) >= 11


def test_read_only_tensors_are_named() -> None:
    frozen = np.ones(4, np.float32)
    frozen.flags.writeable = False
    for tensor in (frozen, np.float32(3.0), b"abc"):
        bound = BoundTensors.of({"fine": np.ones(2), "frozen": tensor})
        with pytest.raises(ModelMismatch, match="frozen: its memory is read-only"):
            bound.require_writable()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_types_that_cannot_be_averaged_are_named(dtype: str) -> None:
    with pytest.raises(ModelMismatch, match=f"tiny: a tensor of dtype {dtype} cannot be averaged"):
        SegmentMap({"tiny": TensorSpec(dtype, (3,))})


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([["w", "float32", [2, 3]]], r"b: float32\[3\] in the group, but no further tensor in peer q"),
        (
            [["w", "float32", [3, 2]], ["b", "float32", [3]]],
            r"w: float32\[2, 3\] in .*, but w: float32\[3, 2\] in peer q",
        ),
        (
            [["w", "float64", [2, 3]], ["b", "float32", [3]]],
            r"w: float32\[2, 3\] in .*, but w: float64\[2, 3\] in peer q",
        ),
        ([["w", "float32", [2, 3]], 17], r"but something that is no tensor's description in peer q"),
        (17, "something that is no signature"),
    ],
)
def test_the_first_tensor_that_differs_is_named_with_both_sides(theirs: Any, message: str) -> None:
    mine = [["w", "float32", [2, 3]], ["b", "float32", [3]]]
    check_same(mine, mine, "peer q")
    with pytest.raises(ModelMismatch, match=message):
        check_same(mine, theirs, "peer q")


def test_binding_other_tensors_than_the_map_was_made_for_is_refused() -> None:
    model = make_model(1)
    segments = SegmentMap(specs_of(model))
    with pytest.raises(ModelMismatch, match="mask"):
        BoundTensors(segments, {**model, "mask": np.zeros(8, bool)})
