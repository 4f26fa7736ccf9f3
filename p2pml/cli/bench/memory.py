"""The highest memory of this process during a piece of work."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

POLL_SECONDS = 0.001


class PeakMemory:
    """From its making to `stop`; then `extra` is the peak of the resident memory above what it was at first, in bytes.

    `method` says how it was found: 'high-water mark' (Linux; the kernel's own, reset before), where that may not be reset
    'polled' (every `POLL_SECONDS`, which misses short peaks and takes a little time of the work's).
    """

    extra: int

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.method = "high-water mark"
            self._before = _status("VmRSS")
        except OSError:
            self.method = "polled"
            self._ended = threading.Event()
            self._before = self._peak = _resident()
            self._thread = threading.Thread(target=self._poll, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the measurement."""
        if self.method == "polled":
            self._ended.set()
            self._thread.join()
            self.extra = max(self._peak, _resident()) - self._before
        else:
            self.extra = _status("VmHWM") - self._before

    def _poll(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._peak = max(self._peak, _resident())


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024


def _resident() -> int:
    import psutil

    resident: int = psutil.Process(os.getpid()).memory_info().rss
    return resident
