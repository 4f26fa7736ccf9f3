from __future__ import annotations

import array
import ctypes
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from p2pml.errors import MessageError, MissingExtra
from p2pml.wire.tensors import Tensor, TensorSpec, allocate, export, itemsize

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

NUMPY_DTYPES = [
    "float64", "float32", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128",
]  # fmt: skip
ONLY_TORCH = [
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=5).map(tuple)


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def received(value: Any) -> Tensor:
    """What the other side has of a value: the same spec over fresh memory."""
    spec, data = export(value)
    assert data.format == "B"
    assert data.ndim == 1
    assert data.nbytes == len(data) == spec.nbytes
    memory = allocate(len(data))
    memory[:] = data
    return Tensor(spec, memory)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Any dtype and shape, in either byte order, of any memory order: strided, reversed, transposed, read-only."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES))).newbyteorder(draw(st.sampled_from("<>")))
    made = draw(hnp.arrays(dtype, draw(SHAPES)))
    if made.ndim and draw(st.booleans()):
        made = made[:: draw(st.sampled_from([-2, -1, 2]))]
    if draw(st.booleans()):
        made = made.T
    made.flags.writeable = draw(st.booleans())
    return made


@given(arrays())
def test_numpy_arrays_arrive_bit_by_bit(sent: np.ndarray[Any, Any]) -> None:
    tensor = received(sent)
    arrived = tensor.numpy()
    native = sent.astype(sent.dtype.newbyteorder("="))
    assert (arrived.dtype, arrived.shape) == (native.dtype, sent.shape)
    assert arrived.tobytes() == native.tobytes()
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (native.dtype.name, sent.shape, sent.nbytes)


@given(st.sampled_from(NUMPY_DTYPES + ONLY_TORCH), SHAPES, st.data())
def test_torch_tensors_arrive_bit_by_bit(dtype: str, shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape) * itemsize(dtype)
    bits = data.draw(st.binary(min_size=size, max_size=size))
    if dtype == "bool":
        bits = bytes(byte & 1 for byte in bits)
    made = torch.empty(shape, dtype=getattr(torch, dtype))
    if bits:
        made = torch.frombuffer(bytearray(bits), dtype=torch.uint8).view(made.dtype).reshape(shape)
    transposed, strided = data.draw(st.tuples(st.booleans(), st.booleans()))
    sent = made.permute(tuple(reversed(range(len(shape))))) if transposed else made
    if shape and strided:
        sent = sent[::2]
    arrived = received(sent).torch()
    assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
    assert arrived.is_contiguous()
    if sent.numel():
        wanted = torch.empty(sent.shape, dtype=sent.dtype).copy_(sent).reshape(-1).view(torch.uint8)
        assert torch.equal(arrived.reshape(-1).view(torch.uint8), wanted)


@given(SHAPES, st.sampled_from(NUMPY_DTYPES))
def test_memory_in_wire_order_is_not_copied(shape: tuple[int, ...], dtype: str) -> None:
    sent = np.zeros(shape, dtype)
    _, view = export(sent)
    _, torch_view = export(torch.from_numpy(sent))
    if sent.size:
        assert address(view) == address(torch_view) == sent.ctypes.data
    memory = allocate(sent.nbytes)
    tensor = Tensor(TensorSpec(dtype, shape), memory)
    if sent.size:
        assert address(memory) == tensor.numpy().ctypes.data == tensor.torch().data_ptr()


@pytest.mark.parametrize("dtype", ONLY_TORCH)
def test_bits_that_numpy_lacks_are_not_copied_either(dtype: str) -> None:
    sent = torch.zeros(3, 5).to(getattr(torch, dtype))
    spec, view = export(sent)
    assert (spec, address(view)) == (TensorSpec(dtype, (3, 5)), sent.data_ptr())
    assert Tensor(spec, view).torch().data_ptr() == sent.data_ptr()
    with pytest.raises(MessageError, match=f"numpy has no {dtype}: use .torch()"):
        Tensor(spec, view).numpy()


def test_a_single_element_with_a_stride_is_not_copied() -> None:
    for sent in (np.arange(4.0)[1::3], np.arange(12.0).reshape(3, 4)[1:2, 1:2], np.arange(4.0)[2:1:-1]):
        assert address(export(sent)[1]) == sent.ctypes.data
    whole = torch.arange(12.0).reshape(3, 4)
    for part in (whole[1, 1::3], whole[1:2, 1:2], whole[2, 3]):
        assert address(export(part)[1]) == part.data_ptr()


def test_a_view_of_a_larger_tensor_is_sent_from_where_it_is() -> None:
    whole = torch.arange(24).reshape(4, 6)
    _, view = export(whole[1:3])
    assert (address(view), len(view)) == (whole[1:].data_ptr(), 2 * 6 * 8)


def test_bfloat16_keeps_every_bit_pattern() -> None:
    sent = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    tensor = received(sent)
    assert tensor.nbytes == 2 << 16
    assert torch.equal(tensor.torch().view(torch.int16), sent.view(torch.int16))


def test_the_exported_view_keeps_the_value_alive() -> None:
    assert bytes(export(torch.tensor([1, 2], dtype=torch.uint8))[1]) == b"\x01\x02"
    assert bytes(export(np.array([1, 2], ">u2"))[1]) == b"\x01\x00\x02\x00"


def test_torch_tensors_in_unusual_states() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    spec, view = export(parameter)
    assert (spec, address(view)) == (TensorSpec("float32", (2,)), parameter.data_ptr())
    assert address(export(parameter * 2)[1])  # a result that has a gradient function
    complexes = torch.tensor([[1 + 2j, 3 - 4j]])
    assert torch.equal(received(complexes.conj()).torch(), torch.tensor([[1 - 2j, 3 + 4j]]))
    assert torch.equal(received(complexes.mH).torch(), torch.tensor([[1 - 2j], [3 + 4j]]))
    assert torch.equal(received(complexes.conj().imag).torch(), torch.tensor([[-2.0, 4.0]]))
    assert torch.equal(received(torch.ones(1).expand(3, 2)).torch(), torch.ones(3, 2))
    with torch.inference_mode():
        assert torch.equal(received(torch.ones(2)).torch(), torch.ones(2))


@pytest.mark.parametrize(
    ("value", "spec"),
    [
        (b"abc", TensorSpec("uint8", (3,))),
        (b"", TensorSpec("uint8", (0,))),
        (bytearray(b"abc"), TensorSpec("uint8", (3,))),
        (memoryview(b"abcdef")[::2], TensorSpec("uint8", (3,))),
        (memoryview(bytearray(24)).cast("d", (1, 3)), TensorSpec("float64", (1, 3))),
        (array.array("f", [1, 2]), TensorSpec("float32", (2,))),
        ((ctypes.c_int16 * 3)(1, 2, 3), TensorSpec("int16", (3,))),
        ((ctypes.c_int16.__ctype_be__ * 3)(1, 2, 3), TensorSpec("int16", (3,))),
        (np.float32(3), TensorSpec("float32", ())),
        (np.bool_(True), TensorSpec("bool", ())),
        (np.array(1.5), TensorSpec("float64", ())),
    ],
)
def test_buffers_and_scalars(value: Any, spec: TensorSpec) -> None:
    tensor = received(value)
    assert tensor.spec == spec
    assert tensor.numpy().tolist() == np.asarray(memoryview(value)).tolist()


def test_a_tensor_is_sent_on_from_its_own_memory() -> None:
    tensor = received(np.arange(3))
    assert export(tensor) == (tensor.spec, tensor.data)
    assert export(tensor)[1] is tensor.data


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (np.array([None]), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.zeros(2, "M8[s]"), "dtype datetime64"),
        (np.zeros(2, [("a", "f4")]), "dtype .*'a'"),
        (np.zeros(2, "V4"), "dtype .V4"),
        (np.ma.array([1], mask=[True]), "masked array"),
        (array.array("u", "ab"), "dtype <U1"),
        ((ctypes.c_char * 3)(), "dtype .S1"),
        ((ctypes.POINTER(ctypes.c_int) * 2)(), "no format that can be sent"),
        ([1.0], "list is no tensor"),
        (1.0, "float is no tensor"),
        (None, "NoneType is no tensor"),
        (torch.eye(2).to_sparse(), "sparse_coo torch tensor"),
        (torch.ones(2, device="meta"), "meta torch tensor"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested torch tensor"),
        (torch.zeros([1] * 65), "65 dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_sent_is_refused(value: Any, fault: str) -> None:
    with pytest.raises(MessageError, match=fault):
        export(value)


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="long double is double here")
def test_long_double_is_refused() -> None:
    with pytest.raises(MessageError, match="cannot be sent"):
        export(np.longdouble(1))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(MessageError, match="dtype qint8 cannot be sent"):
        export(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8))


def test_memory_that_does_not_fit() -> None:
    spec = TensorSpec("float32", (2, 3))
    with pytest.raises(MessageError, match=r"a tensor float32\[2, 3\] has 24 bytes, not 23"):
        Tensor(spec, bytes(23))
    with pytest.raises(MessageError, match="not contiguous"):
        Tensor(spec, memoryview(bytes(48))[::2])
    with pytest.raises(MessageError, match="unknown dtype 'float31'"):
        Tensor(TensorSpec("float31", ()), b"")
    assert Tensor(spec, np.zeros(6, np.float32).data).data.format == "B"
    assert spec.size == 6
    assert TensorSpec("int8", ()).size == 1


def test_sizes_above_four_gib_are_representable() -> None:
    assert TensorSpec("float64", (1 << 20, 1 << 20)).nbytes == 1 << 43


def test_equality_is_by_bits() -> None:
    assert received(np.array([0.0, np.nan])) == received(np.array([0.0, np.nan]))
    assert received(np.array([0.0])) != received(np.array([-0.0]))
    assert received(np.zeros(2, np.int32)) != received(np.zeros(2, np.float32))
    assert received(np.zeros((2, 1))) != received(np.zeros((1, 2)))
    assert received(np.zeros(2)) != [0.0, 0.0]
    with pytest.raises(TypeError, match="unhashable"):
        hash(received(np.zeros(2)))
    assert repr(received(np.zeros((2, 3), np.int8))) == "<Tensor int8[2, 3]>"


def test_numpy_takes_a_tensor_for_an_array() -> None:
    tensor = received(np.array([1.5, 2.5]))
    assert np.asarray(tensor).ctypes.data == address(tensor.data)
    assert np.array(tensor).ctypes.data != address(tensor.data)
    assert np.asarray(tensor, np.float32).dtype == np.float32
    assert np.add(tensor, 1).tolist() == [2.5, 3.5]
    with pytest.raises(ValueError, match="copy"):
        np.asarray(tensor, np.float32, copy=False)


def test_read_only_memory_is_protected() -> None:
    tensor = Tensor(TensorSpec("uint8", (3,)), b"abc")
    assert not tensor.numpy().flags.writeable
    tensor.torch().zero_()
    assert bytes(tensor.data) == b"abc"


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    tensor = received(np.zeros(2))
    with pytest.raises(MissingExtra, match=r"pip install 'p2pml\[torch\]'"):
        tensor.torch()


def test_a_torch_without_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(MessageError, match="has no float8_e8m0fnu"):
        Tensor(TensorSpec("float8_e8m0fnu", (1,)), b"\0").torch()


def test_allocated_memory_is_bytes_and_writable() -> None:
    for size in (0, 1, 4096):
        memory = allocate(size)
        assert (len(memory), memory.format, memory.readonly) == (size, "B", False)


def test_neither_numpy_nor_torch_is_imported_with_the_module() -> None:
    loaded = "import sys, p2pml.wire.codec, p2pml.wire.compression; assert not {'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", loaded], check=True, timeout=30)
    without = "import sys; from p2pml.wire.tensors import export; export(b'ab'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", without], check=True, timeout=30)
