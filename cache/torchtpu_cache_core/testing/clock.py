"""A clock that a test moves."""

from __future__ import annotations

import threading
import time


class ManualClock:
    """Stands still until `advance`. Starts at the real time, so that it agrees with what a file system stamps."""

    def __init__(self, start_seconds: float | None = None) -> None:
        self._lock = threading.Lock()  # guards _now
        self._now = time.time() if start_seconds is None else start_seconds

    def time(self) -> float:
        with self._lock:
            return self._now

    def monotonic(self) -> float:
        return self.time()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
