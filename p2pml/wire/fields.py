"""What the fields of a message may be, compiled from their annotations once, when the class is made."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, Union, get_args, get_origin

from p2pml.wire.plain import (
    MAX_DEPTH,
    Mismatch,
    boolean,
    entries,
    integer,
    items,
    nothing,
    number,
    octets,
    plain,
    text,
    type_name,
)
from p2pml.wire.tensors import Tensor

if TYPE_CHECKING:
    TensorLike: TypeAlias = Any
else:
    TensorLike = Tensor
"""A field with one tensor. Fill it with whatever `export` takes; what arrives is a `Tensor`. (Type checkers see Any; a
field annotated `Tensor` works alike, but they then ask for a `Tensor` when the message is made.)"""
Tensors: TypeAlias = dict[str, TensorLike]
"""A field with named tensors, in order."""

Convert: TypeAlias = Callable[[Any], Any]
"""From a value to plain data and back: checks, and makes plain. Raises `Mismatch`."""

_LEAVES: dict[Any, Convert] = {
    int: integer, float: number, str: text, bool: boolean, bytes: octets, None: nothing, type(None): nothing,
}  # fmt: skip


class Field(NamedTuple):
    """A compiled field: plain data, which `convert` checks, or tensors."""

    name: str
    convert: Convert
    tensors: type[OneTensor] | None
    optional: bool


def compile_field(name: str, annotation: Any) -> Field:
    """How to send and to check a field. Raises `TypeError` for an annotation that is not supported."""
    inner, optional = _without_none(annotation)
    tensors = _TENSORS.get(inner)
    return Field(name, nothing if tensors else _compile(annotation, MAX_DEPTH), tensors, optional)


def _compile(annotation: Any, depth: int) -> Convert:
    if annotation in _LEAVES:
        return _LEAVES[annotation]
    if annotation is Any:
        return partial(plain, depth=depth)
    inner, optional = _without_none(annotation)
    if optional:
        return partial(_optional, _compile(inner, depth))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin not in (list, tuple, dict) or not arguments:
        raise TypeError(f"{annotation!r} cannot be sent")
    if not depth:
        raise TypeError(f"more than {MAX_DEPTH} containers inside each other")
    if origin is list:
        return partial(_list, _compile(arguments[0], depth - 1))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return partial(_tuple, _compile(arguments[0], depth - 1))
        return partial(_fixed, [_compile(argument, depth - 1) for argument in arguments])
    if arguments[0] not in (str, int):
        raise TypeError(f"{annotation!r} cannot be sent: keys must be str or int")
    return partial(_dict, _LEAVES[arguments[0]], _compile(arguments[1], depth - 1))


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    others = [argument for argument in get_args(annotation) if argument is not type(None)]
    if len(others) != 1:
        raise TypeError(f"{annotation!r} cannot be sent: of unions, only `X | None` can")
    return others[0], True


def _optional(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _list(convert: Convert, value: Any) -> list[Any]:
    return list(items(value, convert))


def _tuple(convert: Convert, value: Any) -> tuple[Any, ...]:
    return tuple(items(value, convert))


def _fixed(converts: list[Convert], value: Any) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)) and len(value) != len(converts):
        raise Mismatch(f"expected {len(converts)} items, not {len(value)}")
    one_by_one = iter(converts)
    return tuple(items(value, lambda item: next(one_by_one)(item)))


def _dict(name: Convert, convert: Convert, value: Any) -> dict[Any, Any]:
    return dict(entries(value, name, convert))


class OneTensor:
    """A field with one tensor: True in the head."""

    @staticmethod
    def split(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
        """What stands for the tensors in the head, and the tensors, each with the step that leads to it."""
        return True, [("", value)]

    @staticmethod
    def count(stand_in: Any) -> int:
        """How many tensors a received stand-in announces. Raises `Mismatch`."""
        if stand_in is not True:
            raise Mismatch(f"expected a tensor, not {type_name(stand_in)}")
        return 1

    @staticmethod
    def join(stand_in: Any, tensors: Iterator[Tensor]) -> Any:
        """The field's value, of as many of the `tensors` as were announced."""
        return next(tensors)


class TensorList(OneTensor):
    """A field with a list of tensors: their count in the head."""

    @staticmethod
    def split(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
        if not isinstance(value, (list, tuple)):
            raise Mismatch(f"expected a list of tensors, not {type_name(value)}")
        return len(value), [(f"[{index}]", tensor) for index, tensor in enumerate(value)]

    @staticmethod
    def count(stand_in: Any) -> int:
        if type(stand_in) is not int or stand_in < 0:
            raise Mismatch("expected a count of tensors")
        return stand_in

    @staticmethod
    def join(stand_in: Any, tensors: Iterator[Tensor]) -> Any:
        return list(islice(tensors, stand_in))


class TensorMap(OneTensor):
    """A field with named tensors: the list of their names in the head."""

    @staticmethod
    def split(value: Any) -> tuple[Any, list[tuple[str, Any]]]:
        if not isinstance(value, Mapping):
            raise Mismatch(f"expected a map of tensors, not {type_name(value)}")
        return [text(name) for name in value], [(f"[{name!r}]", tensor) for name, tensor in value.items()]

    @staticmethod
    def count(stand_in: Any) -> int:
        names = list(items(stand_in, text))
        if len(set(names)) != len(names):
            raise Mismatch("two tensors of the same name")
        return len(names)

    @staticmethod
    def join(stand_in: Any, tensors: Iterator[Tensor]) -> Any:
        return dict(zip(stand_in, tensors, strict=False))


_TENSORS: dict[Any, type[OneTensor]] = {Tensor: OneTensor, list[Tensor]: TensorList, dict[str, Tensor]: TensorMap}
