"""Interleaved rounds: each measures every way once, in turn, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Taken(NamedTuple):
    """What one measurement took.

    Args:
        seconds: by the clock on the wall.
        cpu_seconds: of processor time, of all threads; None where it is spent in another process.
    """

    seconds: float
    cpu_seconds: float | None = None


class Stopwatch:
    """Runs from its making to `stop`."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._started = time.perf_counter()

    def stop(self) -> Taken:
        return Taken(time.perf_counter() - self._started, time.process_time() - self._cpu)


def taken_by(call: Callable[[], object]) -> Taken:
    """What `call` takes. What it gives is let go after the clock has stopped."""
    watch = Stopwatch()
    given = call()
    taken = watch.stop()
    del given
    return taken


@dataclass(frozen=True)
class Rounds:
    """What was taken by way, one of each per round."""

    taken: dict[str, list[Taken]]

    def median(self, way: str) -> float:
        """Of the seconds."""
        return statistics.median(taken.seconds for taken in self.taken[way])

    def ratio(self, way: str, floor: str) -> float:
        """Of the medians."""
        return self.median(way) / self.median(floor)

    def extra(self, way: str, floor: str) -> float:
        """Seconds that one median is over the other; negative where noise is more than that."""
        return self.median(way) - self.median(floor)

    def told(self, *ways: str) -> dict[str, Any]:
        """How many rounds there were, and for each way the median, quartiles and least of its milliseconds.

        And the median of its processor time, where that is known: other work on the machine changes it least.
        """
        shown: dict[str, Any] = {"rounds": min(len(self.taken[way]) for way in ways)}
        for way in ways:
            seconds = [taken.seconds for taken in self.taken[way]]
            low, middle, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
            shown[f"{way}_ms"] = _shown(middle)
            shown[f"{way}_quartiles_ms"] = [_shown(low), _shown(high)]
            shown[f"{way}_least_ms"] = _shown(min(seconds))
            cpu = [taken.cpu_seconds for taken in self.taken[way] if taken.cpu_seconds is not None]
            if cpu:
                shown[f"{way}_cpu_ms"] = _shown(statistics.median(cpu))
        return shown


def interleaved(rounds: int, ways: dict[str, Callable[[], Taken]], *, warm: int = 2) -> Rounds:
    """Calls each way once per round, in turn; each gives what it took.

    Args:
        warm: so many rounds before do not count.
    """
    taken: dict[str, list[Taken]] = {way: [] for way in ways}
    for number in range(-warm, rounds):
        for way, measure in ways.items():
            this = measure()
            if number >= 0:
                taken[way].append(this)
    return Rounds(taken)


def _shown(seconds: float) -> float:
    return float(f"{seconds * 1000:.4g}")
