"""Credits: who may send how much. No I/O.

As in QUIC, a credit is an absolute limit: the receiver says up to which total the sender may go, the sender counts what it
has sent. Limits only rise, so repeating or losing an update does no harm, and a leak shows at once: at rest,
``limit - consumed == window``.

There are three kinds. A channel has a window of messages and a window of bytes; a link has a window of bytes over all its
channels. They cover messages up to the channel's `eager` size. A larger message is offered first: the receiver takes its
size from the process's `MemoryBudget`, when there is room, and accepts; such a message is its own window.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from p2pml.errors import ProtocolError


class SendWindow:
    """The sender's side of a limit."""

    __slots__ = ("limit", "sent")

    def __init__(self, limit: int = 0) -> None:
        self.sent = 0
        self.limit = limit

    @property
    def available(self) -> int:
        """How much may be sent now."""
        return self.limit - self.sent

    def charge(self, amount: int) -> None:
        """Count `amount` as sent; the caller has seen that it is available."""
        self.sent += amount

    def raise_to(self, limit: int) -> bool:
        """Take a limit from the receiver; true if it rose. Lower ones are old news and change nothing."""
        if limit <= self.limit:
            return False
        self.limit = limit
        return True


class ReceiveWindow:
    """The receiver's side of a limit: `size` is what may be under way or unread at a time.

    `received` counts what came in, `consumed` what the application took or discarded of it. Once that reaches `due`, half
    the window is owed, and a limit should be told.
    """

    __slots__ = ("consumed", "due", "granted_by_hand", "limit", "received", "size")

    def __init__(self, size: int, *, manual: bool = False) -> None:
        self.size = 0 if manual else size
        self.granted_by_hand = manual
        self.limit = self.size
        self.received = 0
        self.consumed = 0
        self._set_due()

    def _set_due(self) -> None:
        half = max(1, (self.size + 1) // 2)
        self.due = sys.maxsize if self.granted_by_hand else self.limit - self.size + half

    def receive(self, amount: int, what: str) -> None:
        """Count what came in. Raises `ProtocolError` if the sender had no credit for it."""
        if self.received + amount > self.limit:
            raise ProtocolError(f"{what}: {self.received + amount - self.limit} beyond the credit of {self.limit}")
        self.received += amount

    @property
    def owed(self) -> int:
        """How much could be given back now."""
        return max(0, self.consumed + self.size - self.limit)

    def renew(self) -> int:
        """Give back all that is owed; returns the limit, which is told now.

        Not before: a peer that does not listen gets no credit, so what waits to be told to it is bounded too.
        """
        if self.owed:
            self.limit = self.consumed + self.size
            self._set_due()
        return self.limit

    def grant(self, amount: int) -> None:
        """Let `amount` more in, on a window that is granted by hand."""
        self.limit += amount

    def resize(self, size: int) -> None:
        """Make the window larger; its limit rises by the difference."""
        self.limit += max(0, size - self.size)
        self.size = max(size, self.size)
        self._set_due()


class MemoryBudget:
    """One bound for the memory that a process's links may take for what they receive, in bytes.

    Parts that are `fixed` (each link's windows) stay taken as long as a link; a link that would not fit is refused. Offered
    messages wait in one queue, first come first served, until what they need is free.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self.peak = 0
        self.fixed = 0
        """How much is taken, or waited for, by links as long as they stand."""
        self._waiting: deque[tuple[int, Callable[[], None], bool]] = deque()

    def could_fit(self, amount: int) -> bool:
        """Whether `amount` will be free once all messages are read. One that never will would hold up the queue."""
        return amount <= self.total - self.fixed

    def try_reserve(self, amount: int, *, fixed: bool = False) -> bool:
        """Take `amount` if it is free and nobody waits in front."""
        if self._waiting or self.used + amount > self.total:
            return False
        self._take(amount)
        self.fixed += amount if fixed else 0
        return True

    def reserve(self, amount: int, granted: Callable[[], None], *, fixed: bool = False) -> None:
        """Take `amount` now or later; `granted` is called once it is taken, perhaps before this returns.

        Forget a waiting request with `withdraw`. What does not pass `could_fit` is the caller's to refuse.
        """
        if self.try_reserve(amount, fixed=fixed):
            granted()
        else:
            self.fixed += amount if fixed else 0
            self._waiting.append((amount, granted, fixed))

    def withdraw(self, granted: Callable[[], None]) -> None:
        """Forget the waiting request that would have called `granted`."""
        self.fixed -= sum(amount for amount, waiting, fixed in self._waiting if fixed and waiting is granted)
        self._waiting = deque(item for item in self._waiting if item[1] is not granted)
        self._serve()

    def release(self, amount: int, *, fixed: bool = False) -> None:
        """Give `amount` back, and serve those that wait."""
        self.used -= amount
        self.fixed -= amount if fixed else 0
        self._serve()

    def _take(self, amount: int) -> None:
        self.used += amount
        self.peak = max(self.peak, self.used)

    def _serve(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.total:
            amount, granted, _ = self._waiting.popleft()
            self._take(amount)
            granted()
