"""Adding up peers' models segment by segment: what is carried, in which precision, and what is refused.

====================================  ===================  =========================================================
elements                              on the wire          rule
====================================  ===================  =========================================================
float32; complex64 as pairs           float32, sums        Σθ·w, divided by Σθ once, at the root
float64; complex128 as pairs          float64, sums        the same
integers                              float64, sums        the same, then rounded, halves to even; a sum beyond 2**53,
                                                           which float64 does not hold exactly, is refused
bool                                  float64, sums        true where the mean is at least 1/2
float16; complex32 as pairs           float16, means       (θᵢwᵢ + θⱼwⱼ)/(θᵢ + θⱼ), computed in float32, rounded to
                                                           nearest, halves to even
bfloat16                              bfloat16, means      the same
float8 and all else                   (refused)
====================================  ===================  =========================================================

Means are MDLdroid's Eq. 3 as it stands, where sums could overflow and every pass costs a conversion anyhow; sums are
the same equation with the division put off, one pass over the memory for each merge. NaN and infinities are refused
wherever they appear, and so is a sum that overflows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2pml.protocols.training.errors import TrainingError
from p2pml.protocols.training.segments import Array, BoundTensors, Segment, SegmentMap
from p2pml.wire.tensors import Tensor

EXACT = 2.0**53
"""Up to here every integer is a float64."""
_BF16_EXPONENT = np.uint16(0x7F80)


_quiet = np.errstate(over="ignore", invalid="ignore")  # what overflows is found, and refused with its name


def check_weight(weight: float) -> None:
    """Raise `ValueError` unless `weight` can be one contribution's: finite, not negative, and of a sensible size."""
    if not 0.0 <= weight <= EXACT:
        raise ValueError(f"the weight of a contribution is a number from 0 to 2**53, not {weight}")


class Unusable(TrainingError):
    """Values that must not enter an average; the message names the first. `received`: they came from another peer."""

    def __init__(self, message: str, *, received: bool) -> None:
        super().__init__(message)
        self.received = received


class Accumulator:
    """One peer's part of a reduction: a buffer for each group of a `SegmentMap`, made once and used in every round.

    Of each segment `views` is the memory (to add to, or to receive into), `tensors` the same for the wire, and
    `weights` the Σθ of what is in it: 0 until the first contribution, which overwrites what is there.
    """

    def __init__(self, segments: SegmentMap) -> None:
        self.segments = segments
        self.buffers = {group: np.empty(size, group.stored) for group, size in segments.groups.items()}
        self.views: list[Array] = [self.buffers[part.group][part.start : part.stop] for part in segments.segments]
        self.tensors = [
            Tensor(part.spec, view.view(np.uint8).data)
            for part, view in zip(segments.segments, self.views, strict=True)
        ]
        self.weights = [0.0] * len(segments)
        self.empty = [True] * len(segments)
        self._spare = np.empty(0, np.uint8)

    def reset(self) -> None:
        """Begin another round; the memory stays."""
        self.weights = [0.0] * len(self.segments)
        self.empty = [True] * len(self.segments)

    def own(self, index: int, bound: BoundTensors, weight: float) -> Tensor | None:
        """A contribution to which nothing is added, as it goes on the wire, in the model's own memory.

        None if it must be scaled or collected first, by `add_own`. Raises `Unusable`.
        """
        part = self.segments.segments[index]
        view = bound.view(index) if weight == 1.0 or part.group.is_mean else None
        if view is None:
            return None
        self._require_usable(index, view)
        return Tensor(part.spec, view.view(np.uint8).data)

    @_quiet
    def add_own(self, index: int, bound: BoundTensors, weight: float) -> None:
        """Add this peer's contribution with weight θ. Raises `Unusable`."""
        part, into = self.segments.segments[index], self.views[index]
        factor = 1.0 if part.group.is_mean else weight
        if self.empty[index]:
            self._collect(index, bound, factor, into)
            self._require_usable(index, into)
        elif factor != 1.0 or part.group.is_mean:
            self._merge(index, self._collect(index, bound, factor, self._scratch(part)), weight, received=False)
        else:
            for own, where in bound.parts(index):
                np.add(into[where], own, out=into[where])
            if not _is_usable(part, into):
                self._require_usable(index, self._collect(index, bound, 1.0, self._scratch(part)))
                self._require_usable(index, into, "the sum at ")
        self._count(index, weight)

    @_quiet
    def add(self, index: int, data: Array, weight: float) -> None:
        """Add what another peer sent, of weight Σθ. Raises `Unusable`."""
        if self.empty[index]:
            self._require_usable(index, data, received=True)
            np.copyto(self.views[index], data)
        else:
            self._merge(index, data, weight, received=True)
        self._count(index, weight)

    def adopt(self, index: int, weight: float) -> None:
        """What another peer sent was received straight into the segment's memory, as the first in it.

        Raises `Unusable`.
        """
        self._require_usable(index, self.views[index], received=True)
        self._count(index, weight)

    def store(self, index: int, data: Array | None, weight: float) -> None:
        """Put in a segment of the result, in place of what is there; None if it was received there.

        Raises `Unusable`.
        """
        if data is not None:
            np.copyto(self.views[index], data)
        self._require_usable(index, self.views[index], received=True)
        self.weights[index], self.empty[index] = weight, False

    @_quiet
    def finish(self, index: int) -> None:
        """At the root: make the weighted mean of what was added up. Raises `Unusable` if all weights are zero."""
        part, view, weight = self.segments.segments[index], self.views[index], self.weights[index]
        if weight <= 0.0:
            raise Unusable("all weights are zero", received=False)
        if not part.group.is_mean and weight != 1.0:
            np.divide(view, weight, out=view)
        for where, dtype in part.discrete:
            if dtype == "bool":
                np.greater_equal(view[where], 0.5, out=view[where])
            else:
                np.rint(view[where], out=view[where])

    def result(self) -> dict[str, Tensor]:
        """All tensors after a round; until the next one in the accumulator's own memory, where that has their dtype."""
        found = {}
        places = zip(self.segments.names, self.segments.specs, self.segments.offsets, strict=True)
        for name, spec, (group, start) in places:
            data = self.buffers[group][start : start + spec.size * (2 if spec.dtype.startswith("complex") else 1)]
            if group.wire == "float64" and not spec.dtype.startswith(("float", "complex")):
                data = data.astype(spec.dtype)
            found[name] = Tensor(spec, data.view(np.uint8).data)
        return found

    # ---------------------------------------------------------------------------------------------- the arithmetic

    def _count(self, index: int, weight: float) -> None:
        self.weights[index] += weight
        self.empty[index] = False

    def _merge(self, index: int, data: Array, weight: float, *, received: bool) -> None:
        part, into = self.segments.segments[index], self.views[index]
        if part.group.is_mean:
            self._require_usable(index, data, received=received)
            if total := self.weights[index] + weight:
                share = np.float32(weight / total)
                _store(_load(into) * (np.float32(1.0) - share) + _load(data) * share, into)
            return
        np.add(into, data, out=into)
        # One look at the sum is enough: it shows a NaN or an infinity of either part, and its own overflow.
        if not _is_usable(part, into):
            self._require_usable(index, data, received=received)
            self._require_usable(index, into, "the sum at ")

    def _collect(self, index: int, bound: BoundTensors, factor: float, into: Array) -> Array:
        """This peer's contribution by itself, times `factor`."""
        for own, where in bound.parts(index):
            if factor == 1.0:
                np.copyto(into[where], own)
            else:
                np.multiply(own, factor, out=into[where])
        return into

    def _scratch(self, part: Segment) -> Array:
        nbytes = part.size * part.group.stored.itemsize
        if len(self._spare) < nbytes:
            self._spare = np.empty(nbytes, np.uint8)
        scratch: Array = self._spare[:nbytes].view(part.group.stored)
        return scratch

    def _require_usable(self, index: int, data: Array, what: str = "", *, received: bool = False) -> None:
        part = self.segments.segments[index]
        if _is_usable(part, data):
            return
        values = _load(data) if part.group.is_mean else data
        wrong = ~np.isfinite(values)
        for where, _ in part.discrete:
            wrong[where] |= np.abs(values[where]) > EXACT
        element = int(wrong.argmax())
        value = values[element]
        why = ", beyond 2**53, where averages of integers are not exact" if np.isfinite(value) else ""
        raise Unusable(f"{what}{self.segments.name(index, element)} is {value:.17g}{why}", received=received)


def _is_usable(part: Segment, data: Array) -> bool:
    if part.group.wire == "bfloat16":
        return not bool(((data & _BF16_EXPONENT) == _BF16_EXPONENT).any())
    if not np.isfinite(data).all():
        return False
    return all(bool((np.abs(data[where]) <= EXACT).all()) for where, _ in part.discrete)


def _load(data: Array) -> NDArray[np.float32]:
    """float16, or bfloat16 as the upper halves of float32, as float32."""
    if data.dtype != np.uint16:
        return data.astype(np.float32)
    return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _store(values: NDArray[np.float32], into: Array) -> None:
    """The reverse of `_load`, rounding to nearest, halves to even."""
    if into.dtype == np.uint16:
        bits = values.view(np.uint32)
        bits += np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        np.right_shift(bits, np.uint32(16), out=into, casting="unsafe")
    else:
        np.copyto(into, values, casting="same_kind")
