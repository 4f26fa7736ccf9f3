"""What the two halves of a session share: what is to be said, and what has happened. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any


class Shared:
    """events: for the session's owner. control: frames to send before any data. dirty: the channels (0: the link itself)
    whose limits are to be told. ack_due: when received small messages must be acknowledged. now: the owner's clock, seconds.
    """

    __slots__ = ("ack_due", "control", "dirty", "events", "messages_in", "messages_out", "now", "on_output", "open")

    def __init__(self, now: float) -> None:
        self.events: list[Any] = []
        self.control: deque[bytes] = deque()
        self.dirty: dict[int, None] = {}
        self.ack_due: float | None = None
        self.now = now
        self.open = False
        self.messages_in = 0
        self.messages_out = 0
        self.on_output: Callable[[], None] | None = None

    def notify(self) -> None:
        """There is something to send although nobody asked this session for it (memory became free)."""
        if self.on_output is not None:
            self.on_output()
