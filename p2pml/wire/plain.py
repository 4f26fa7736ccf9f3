"""Plain data on the wire: CBOR of None, bool, int, float, str, bytes, lists and maps, and of nothing else.

cbor2 reads far more than that (RFC 8949's tags make dates, regular expressions, huge decimals, cyclic lists; duplicate
keys and trailing bytes pass): here every tag is refused before it is looked at, and what a value may be is checked
after reading.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

import cbor2

from p2pml.errors import MessageError, MessageTooLarge

MAX_HEAD = 16 * 1024
"""Most bytes of a message's head, or of the maps in a handshake."""
MAX_DEPTH = 16
"""Most lists and maps inside each other, in one field or map."""

# cbor2 does not say where the item that it read ended. It is read as the first of two, the second being one that nobody
# can guess: only if that follows at once had the data no tail.
_PAIR, _END = b"\x82", os.urandom(16)
_CBOR_END = cbor2.dumps(_END)
_UNREADABLE = (cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError)


class Mismatch(Exception):
    """A value is not of the type that its place wants; `path` leads to it, e.g. ``.sizes[3]``."""

    def __init__(self, fault: str, path: str = "") -> None:
        super().__init__(fault, path)
        self.fault, self.path = fault, path

    def inside(self, step: str) -> Mismatch:
        """The same, seen from the container: `step` leads from there to here."""
        return Mismatch(self.fault, step + self.path)

    def __str__(self) -> str:
        return f"{self.path}: {self.fault}"


def type_name(value: object) -> str:
    """How a value's type is called in errors."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def integer(value: Any) -> int:
    """An int of 64 bits, signed or unsigned; numpy's integers become Python's. Raises `Mismatch`, as all of these
    do."""
    if type(value) is not int:
        if type(value) is bool or not isinstance(value, Integral):
            raise Mismatch(f"expected int, not {type_name(value)}")
        value = int(value)
    if not -(1 << 63) <= value < 1 << 64:
        raise Mismatch("an int must fit in 64 bits")
    return value  # type: ignore[no-any-return]


def number(value: Any) -> float:
    """A float; ints and numpy's numbers become one."""
    if type(value) is float:
        return value
    if type(value) is bool or not isinstance(value, Real):
        raise Mismatch(f"expected float, not {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise Mismatch("the number is too large for a float") from None


def text(value: Any) -> str:
    """A str; subclasses (numpy's, a StrEnum) become plain ones."""
    if type(value) is str:
        return value
    if not isinstance(value, str):
        raise Mismatch(f"expected str, not {type_name(value)}")
    return str.__str__(value)


def boolean(value: Any) -> bool:
    """A bool."""
    if value is not True and value is not False:
        raise Mismatch(f"expected bool, not {type_name(value)}")
    return value


def octets(value: Any) -> bytes:
    """Bytes; a bytearray or a memoryview is copied."""
    if type(value) is bytes:
        return value
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise Mismatch(f"expected bytes, not {type_name(value)}")
    return bytes(value)


def nothing(value: Any) -> None:
    """None."""
    if value is not None:
        raise Mismatch(f"expected None, not {type_name(value)}")


def key(value: Any) -> int | str:
    """A key of a map: text or an int."""
    if isinstance(value, str):
        return text(value)
    try:
        return integer(value)
    except Mismatch:
        raise Mismatch(f"expected a key of type str or int, not {type_name(value)}") from None


def items(value: Any, convert: Callable[[Any], Any]) -> Iterator[Any]:
    """Every item of a list or tuple, converted; a mismatch tells the index."""
    if not isinstance(value, (list, tuple)):
        raise Mismatch(f"expected list, not {type_name(value)}")
    for index, item in enumerate(value):
        try:
            yield convert(item)
        except Mismatch as wrong:
            raise wrong.inside(f"[{index}]") from None


def entries(value: Any, name: Callable[[Any], Any], convert: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Every key and value of a map, converted; a mismatch tells the key."""
    if not isinstance(value, Mapping):
        raise Mismatch(f"expected dict, not {type_name(value)}")
    for label, item in value.items():
        try:
            yield name(label), convert(item)
        except Mismatch as wrong:
            raise wrong.inside(f"[{label!r:.40}]") from None


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Any plain data, at most `depth` lists and maps inside each other."""
    kind = type(value)
    if value is None or kind is str or kind is float or kind is bool or kind is bytes:
        return value
    if kind is int:
        return integer(value)
    if isinstance(value, (list, tuple, Mapping)):
        if not depth:
            raise Mismatch(f"more than {MAX_DEPTH} lists and maps inside each other")

        def inner(item: Any) -> Any:
            return plain(item, depth - 1)

        return dict(entries(value, key, inner)) if isinstance(value, Mapping) else list(items(value, inner))
    for other, convert in ((str, text), (Integral, integer), (Real, number), ((bytearray, memoryview), octets)):
        if isinstance(value, other):
            return convert(value)
    raise Mismatch(f"expected plain data, not {type_name(value)}")


class _NoTags(dict[int, Any]):
    """Tells cbor2 that every tag there is has a decoder, and that this decoder refuses."""

    def __missing__(self, tag: int) -> Any:
        return _refuse_tag


def _refuse_tag(decoder: object, *value: object) -> Any:
    raise ValueError("tags are not allowed")


_NO_TAGS = _NoTags()


def read(data: bytes | memoryview, what: str, max_size: int = MAX_HEAD, depth: int = MAX_DEPTH) -> Any:
    """The one CBOR item that `data` consists of; its leaves are still to be checked. Raises `MessageError`."""
    if len(data) > max_size:
        raise MessageTooLarge(f"{what}: {len(data)} bytes (at most {max_size})")
    try:
        pair = cbor2.loads(
            _PAIR + data + _CBOR_END,
            semantic_decoders=_NO_TAGS,
            tag_hook=_refuse_tag,
            max_depth=depth + 1,
            allow_indefinite=False,
            allow_duplicate_keys=False,
        )
    except _UNREADABLE as error:
        cause = error.__cause__ or error
        raise MessageError(f"{what}: not readable as CBOR: {cause}") from error
    if pair[1] != _END:
        raise MessageError(f"{what}: bytes after its end")
    return pair[0]


def write(value: Any, what: str) -> bytes:
    """CBOR of a value that was converted by the functions above. Raises `MessageError` (text that is no Unicode)."""
    try:
        return cbor2.dumps(value)
    except UnicodeEncodeError as error:
        raise MessageError(f"{what}: {error}") from error


def plain_loads(data: bytes | memoryview, what: str, max_size: int = MAX_HEAD) -> dict[str, Any]:
    """A map with text as keys and plain data as values, from its CBOR. Raises `MessageError` naming `what`."""
    value = read(data, what, max_size)
    try:
        if not isinstance(value, dict):
            raise Mismatch(f"expected a map, not {type_name(value)}")
        return dict(entries(value, text, plain))
    except Mismatch as wrong:
        raise MessageError(f"{what}{wrong}") from None


def plain_dumps(value: Mapping[str, Any], what: str = "map") -> bytes:
    """The CBOR of such a map. Raises `MessageError` naming `what`."""
    try:
        return write(dict(entries(value, text, plain)), what)
    except Mismatch as wrong:
        raise MessageError(f"{what}{wrong}") from None
