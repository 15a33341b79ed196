"""Time as something that is handed in, so that a test can move it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is stored and shown, monotonic time for deadlines."""

    def time(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, from an arbitrary start."""
        ...


class SystemClock:
    """The machine's own clock."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()
