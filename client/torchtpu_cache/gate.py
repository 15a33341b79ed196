"""When asking a tier does not pay: programs that compile faster than the remote answers, or a tier that is slow."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock

CREDIT_SECONDS: Final = 2.0
MAX_DEBT_SECONDS: Final = 10.0
SHARE: Final = 0.1

_WINDOW: Final = 16
_ENOUGH: Final = 3
_PAUSE_ROUND_TRIPS: Final = 100
_ALIKE: Final = 2


class Credit:
    """What a job may still wait for a tier. Thread-safe.

    Each second that it waited in vain takes one, each that a hit spared gives one, and each of a compile gives a
    tenth; there are never more than two. So a tier is asked as long as that pays, and one that is slow and has nothing
    costs a job at most two seconds and a tenth of its compiles, but for the last wait. That may take any time, and no
    more than ten seconds of it are held against the tier: a machine may have stood still for an hour meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards _seconds
        self._seconds = CREDIT_SECONDS

    @property
    def used_up(self) -> bool:
        return self._seconds <= 0

    def compiled(self, seconds: float) -> None:
        """A compile took this long."""
        self._give(SHARE * seconds)

    def waited(self, seconds: float) -> None:
        """The tier took this long, and gave nothing of use."""
        self._give(-seconds)

    def hit(self, seconds: float, compile_seconds: float) -> None:
        """The tier took this long to give what would take `compile_seconds` to compile."""
        self._give(compile_seconds - seconds)

    def _give(self, seconds: float) -> None:
        with self._lock:
            self._seconds = min(CREDIT_SECONDS, max(-MAX_DEBT_SECONDS, self._seconds + seconds))


class RemoteGate:
    """Closed for programs like those that lately all compiled faster than the remote answers. Thread-safe.

    It looks at the last 16 compiles and the median of the last 16 round trips. A program of more than twice the
    size of all those compiled ones always passes, since nothing is known of its cost; so does one every hundred round
    trips' time, which costs a hundredth, so that a change of either side is noticed.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._lock = threading.RLock()  # guards all below
        self._compiles: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._round_trips: deque[float] = deque(maxlen=_WINDOW)
        self._asked_seconds = 0.0

    def compiled(self, seconds: float, program_bytes: int) -> None:
        """A compile of a program of this size took this long."""
        with self._lock:
            self._compiles.append((seconds, program_bytes))

    def round_trip(self, seconds: float) -> None:
        """The remote took this long to say that it has no entry."""
        with self._lock:
            self._round_trips.append(seconds)
            self._asked_seconds = self._clock.monotonic()

    def closed(self, program_bytes: int) -> bool:
        """Whether a look-up for a program of this size should pass the remote by."""
        with self._lock:
            if len(self._compiles) < _ENOUGH or not self._round_trips:
                return False
            slowest = max(seconds for seconds, _ in self._compiles)
            largest = max(size for _, size in self._compiles)
            round_trip = sorted(self._round_trips)[len(self._round_trips) // 2]
            if program_bytes > _ALIKE * largest or slowest >= round_trip:
                return False
            return self._clock.monotonic() - self._asked_seconds < _PAUSE_ROUND_TRIPS * round_trip
