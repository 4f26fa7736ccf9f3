from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pml.errors import P2PMLError
from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.errors import ModelMismatch, TaskError
from p2pml.protocols.training.tensors import compare_signatures, load_state_tensors, signature, state_tensors


class Tied(nn.Module):
    """Embedding and output share a weight, and a mask is not part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("seen", torch.tensor(7))


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3))


def test_tied_parameters_come_once_and_unsaved_buffers_do_not_come() -> None:
    assert list(state_tensors(Tied())) == ["embed.weight", "seen"]


def test_batch_norm_brings_its_statistics_and_its_counter() -> None:
    model = convolution()
    model(torch.randn(4, 2, 8))
    tensors = state_tensors(model)
    assert list(tensors) == [
        *["0.weight", "0.bias", "1.weight", "1.bias"],
        *["1.running_mean", "1.running_var", "1.num_batches_tracked"],
    ]
    assert tensors["1.num_batches_tracked"].dtype == torch.int64
    assert tensors["1.num_batches_tracked"].item() == 1
    assert not any(tensor.requires_grad for tensor in tensors.values())


def test_the_tensors_are_the_models_own_memory() -> None:
    model = nn.Linear(2, 2)
    state_tensors(model)["weight"].fill_(3.0)
    assert bool((model.weight == 3.0).all())


def test_loading_copies_into_place_in_any_order() -> None:
    source, target = convolution(), convolution()
    source(torch.randn(4, 2, 8))
    places = {name: tensor.data_ptr() for name, tensor in state_tensors(target).items()}
    load_state_tensors(target, dict(reversed(state_tensors(source).items())))
    loaded = state_tensors(target)
    assert {name: tensor.data_ptr() for name, tensor in loaded.items()} == places
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_tensors(source).items())


def test_loading_a_tied_model_keeps_the_tie() -> None:
    source, target = Tied(), Tied()
    load_state_tensors(target, state_tensors(source))
    assert target.out.weight is target.embed.weight
    assert torch.equal(target.out.weight, source.embed.weight)


def test_loading_another_models_tensors_changes_nothing() -> None:
    target = convolution()
    before = {name: tensor.clone() for name, tensor in state_tensors(target).items()}
    wrong = {name: torch.full_like(tensor, 9) for name, tensor in before.items()} | {"1.running_var": torch.ones(4)}
    with pytest.raises(ModelMismatch, match=r"1\.running_var: float32 of shape \(3,\) here.*\(4,\) in peer b's model"):
        load_state_tensors(target, wrong, peer="b")
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_tensors(target).items())


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ([["a", "float32", [2]], ["b", "int64", [3]]], "b: int64 of shape () here, but int64 of shape (3,)"),
        ([["a", "float64", [2]], ["b", "int64", []]], "a: float32 of shape (2,) here, but float64 of shape (2,)"),
        ([["a", "float32", [2]]], "b: int64 of shape () here, but peer p's model has no tensor of that name"),
        ([["b", "int64", []]], "a: float32 of shape (2,) here, but peer p's model has no tensor of that name"),
        ([["c", "bool", [1]], ["a", "float32", [2]], ["b", "int64", []]], "c: bool of shape (1,) in peer p's model"),
        ([["a", "float32", [2]], ["b", "int64", []], ["c", "bool", [1]]], "c: bool of shape (1,) in peer p's model"),
        ([["b", "int64", []], ["a", "float32", [2]]], "tensor 0 is a here, but b in peer p's model"),
        (None, "no model signature"),
        ([["a", "float32"]], "no model signature"),
        ([["a", "float32", 2]], "no model signature"),
        ([[1, "float32", [2]]], "no model signature"),
        ("ab", "no model signature"),
    ],
)
def test_the_first_difference_is_named(theirs: object, said: str) -> None:
    mine = signature({"a": torch.ones(2), "b": torch.tensor(1)})
    with pytest.raises(ModelMismatch) as caught:
        compare_signatures(mine, theirs, "p")  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, P2PMLError)


entries = st.tuples(st.sampled_from("abc"), st.sampled_from(["int8", "bool"]), st.lists(st.integers(0, 2), max_size=2))
signatures = st.lists(entries.map(list), max_size=3, unique_by=lambda entry: entry[0])


@given(signatures, signatures)
def test_signatures_pass_exactly_when_equal(mine: list[list[object]], theirs: list[list[object]]) -> None:
    arrived = json.loads(json.dumps(theirs))
    if mine == theirs:
        compare_signatures(mine, arrived)
    else:
        with pytest.raises(ModelMismatch):
            compare_signatures(mine, arrived)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(TaskError, match="weight of LazyLinear has no shape"):
        state_tensors(nn.LazyLinear(3))
