"""What the traffic itself shows of a link: how many bytes per second it carries while it is busy, and its round trip."""

from __future__ import annotations

_SHARE = 0.25
"""Weight of a new sample in the moving averages."""
_SAMPLE = 1 << 16
"""Fewer bytes than this between two acknowledgements say nothing about a rate."""

_HALF_LIFE = 1.0
"""Seconds of sending after which the highest rate counts for half: so long a link that became slower is overestimated."""


class LinkMeter:
    """Fed with what was sent and what the other side says it received; pure, the caller brings the time in seconds.

    A rate is taken between two acknowledgements with bytes under way all the time between them: an idle link says nothing.
    `bytes_per_second` is a moving average of the rates. `capacity` is the highest of late: a sender that has little to send,
    or a receiver that is slow to take it, makes a rate lower than what the link could carry, and nothing makes it higher.
    """

    __slots__ = ("_busy", "_received", "_then", "bytes_per_second", "capacity", "round_trip")

    def __init__(self) -> None:
        self.bytes_per_second: float | None = None
        self.capacity: float | None = None
        self.round_trip: float | None = None
        self._received = 0
        self._then = 0.0
        self._busy = False

    def acknowledged(self, now: float, received: int, sent: int) -> bool:
        """The other side has `received` bytes in all of the `sent` ones; true if the rate changed."""
        count, elapsed = received - self._received, now - self._then
        if self._busy and (count < _SAMPLE or elapsed <= 0.0) and received < sent:
            return False
        changed = self._busy and count >= _SAMPLE and elapsed > 0.0
        if changed:
            rate = count / elapsed
            old = self.bytes_per_second
            self.bytes_per_second = rate if old is None else old + _SHARE * (rate - old)
            self.capacity = max(rate, (self.capacity or 0.0) * 0.5 ** (elapsed / _HALF_LIFE))
        self._received, self._then, self._busy = received, now, received < sent
        return changed

    def answered(self, seconds: float) -> None:
        """A ping took this long to come back."""
        old = self.round_trip
        self.round_trip = seconds if old is None else old + _SHARE * (seconds - old)
