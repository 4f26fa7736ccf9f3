"""A model as a map of named tensors: what peers send each other, average and store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pml.protocols.training._torch import nn, torch
from p2pml.protocols.training.errors import ModelMismatch, TaskError

Signature = list[list[Any]]
"""A ``[name, dtype, shape]`` for each tensor, in order: plain values that fit in a message's head."""


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that a model has learned: its parameters, then its persistent buffers, by their dotted names.

    The tensors are the model's own memory, without gradient. One that has several names (tied weights) comes once, by
    its first. BatchNorm's running statistics and its integer `num_batches_tracked` are among the buffers; buffers that
    the model's state dict leaves out are left out here. Raises `TaskError` for parameters that have no shape yet.
    """
    kept = model.state_dict(keep_vars=True)
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise TaskError(f"parameter {name} of {type(model).__name__} has no shape before it has seen a batch")
    return {name: tensor.detach() for name, tensor in named if name in kept}


def load_state_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor], peer: str = "") -> None:
    """Copy `tensors` into the model's own memory, whole or not at all; their order does not matter.

    Raises `ModelMismatch` (naming `peer`, where they come from, if given) unless they are the model's in name, dtype,
    shape.
    """
    mine = state_tensors(model)
    theirs = {name: tensors[name] for name in mine if name in tensors} | dict(tensors)
    compare_signatures(signature(mine), signature(theirs), peer)
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(theirs[name])


def signature(tensors: Mapping[str, torch.Tensor]) -> Signature:
    """What two models must have in common to be combined; see `compare_signatures`."""
    return [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()]


def compare_signatures(mine: Sequence[Any], theirs: Sequence[Any], peer: str = "") -> None:
    """Raise `ModelMismatch`, naming the first tensor that differs and both sides of it, unless the signatures are
    equal.

    `theirs` may come from the wire: one that is no signature at all is refused like one that differs.
    """
    whose = f"peer {peer}'s model" if peer else "the other model"
    if not _is_signature(theirs):
        raise ModelMismatch(f"{whose} is described by something that is no model signature")
    for position, (own, other) in enumerate(zip(mine, theirs, strict=False)):
        if list(own) == list(other):
            continue
        if own[0] == other[0]:
            raise ModelMismatch(f"{own[0]}: {_text(own)} here, but {_text(other)} in {whose}")
        if own[0] not in {name for name, *_ in theirs}:
            raise ModelMismatch(f"{own[0]}: {_text(own)} here, but {whose} has no tensor of that name")
        if other[0] not in {name for name, *_ in mine}:
            raise ModelMismatch(f"{other[0]}: {_text(other)} in {whose}, but no tensor of that name here")
        raise ModelMismatch(f"tensor {position} is {own[0]} here, but {other[0]} in {whose}: they are in another order")
    if len(mine) > len(theirs):
        own = mine[len(theirs)]
        raise ModelMismatch(f"{own[0]}: {_text(own)} here, but {whose} has no tensor of that name")
    if len(theirs) > len(mine):
        other = theirs[len(mine)]
        raise ModelMismatch(f"{other[0]}: {_text(other)} in {whose}, but no tensor of that name here")


def _text(entry: Sequence[Any]) -> str:
    return f"{entry[1]} of shape {tuple(entry[2])}"


def _is_signature(value: Any) -> bool:
    def is_entry(entry: Any) -> bool:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            return False
        name, dtype, shape = entry
        return isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, (list, tuple))

    return isinstance(value, (list, tuple)) and all(is_entry(entry) for entry in value)
