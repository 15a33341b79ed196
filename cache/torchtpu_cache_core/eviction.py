"""Which entries go first: GreedyDual by compile seconds saved per byte and recency. Pure; every number is handed in.

GreedyDual gives an entry, at each use, the worth L + cost / size, evicts the least worth, and raises L to what that one
was worth: so an entry that nobody uses is overtaken, the sooner the less it saves per byte. L is the same for all
entries; what an entry needs of its own is L at its last use. A disk tier records only the *time* of the last use, so
`Inflation` remembers L over time instead, and the worth follows from what a file system keeps anyway.
Cost is compile seconds, size is bytes as stored. Candidates may be a sample; then L rises only to the least worth in
it, for the rest of a sample's victims says nothing about the entries that were not looked at.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_POINTS: Final = 128
RESOLUTION_SECONDS: Final = 60.0
"""Last uses are recorded once a minute, so L is no finer."""

_MIN_SIZE_BYTES: Final = 4096
"""No file takes less; otherwise a tiny entry would be worth more than any other for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[T]):
    """An entry that may go. `item` is whatever the caller knows it by."""

    item: T
    size_bytes: int
    compile_seconds: float
    accessed_seconds: float


class Inflation:
    """L over time: points (seconds, level), both rising; the level of a moment is that of the last point before it.

    At most `MAX_POINTS` are kept. The older half thins out first, so it reaches far back at a resolution that falls
    with age. Not thread-safe.
    """

    def __init__(self, points: Iterable[tuple[float, float]] = ()) -> None:
        self._points: list[tuple[float, float]] = []
        for seconds, level in points:
            self.rise(seconds, level)

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        return tuple(self._points)

    def at(self, seconds: float) -> float:
        """L at a moment; 0 before the first eviction."""
        index = bisect.bisect_right(self._points, (seconds, float("inf"))) - 1
        return self._points[index][1] if index >= 0 else 0.0

    def rise(self, seconds: float, level: float) -> None:
        """L is `level` from now on; what would lower it, or is dated before the last point, changes nothing."""
        if self._points:
            last_seconds, last_level = self._points[-1]
            if level <= last_level or seconds < last_seconds:
                return
            if seconds - last_seconds < RESOLUTION_SECONDS:
                self._points[-1] = (last_seconds, level)
                return
        self._points.append((seconds, level))
        if len(self._points) > MAX_POINTS:
            half = MAX_POINTS // 2
            self._points[:half] = self._points[0:half:2]


def worth(candidate: Candidate[T], inflation: Inflation, now_seconds: float) -> float:
    """What an entry is worth, in compile seconds per byte; a last use in the future counts as now."""
    saved = candidate.compile_seconds / max(candidate.size_bytes, _MIN_SIZE_BYTES)
    return inflation.at(min(candidate.accessed_seconds, now_seconds)) + saved


def choose(
    candidates: Sequence[Candidate[T]],
    inflation: Inflation,
    now_seconds: float,
    *,
    need_bytes: int,
    need_entries: int,
) -> list[Candidate[T]]:
    """The candidates that go, least worth first (of equals the longest unused), and L raised accordingly.

    Gives as few as free `need_bytes` and `need_entries`, or all of them where even that does not suffice.
    """
    ranked = sorted(candidates, key=lambda c: (worth(c, inflation, now_seconds), c.accessed_seconds))
    victims: list[Candidate[T]] = []
    for candidate in ranked:
        if need_bytes <= 0 and need_entries <= 0:
            break
        victims.append(candidate)
        need_bytes -= candidate.size_bytes
        need_entries -= 1
    if victims:
        inflation.rise(now_seconds, worth(victims[0], inflation, now_seconds))
    return victims
