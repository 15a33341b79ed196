"""Interleaved rounds: each measures every way once, in turn, so that what else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def seconds_of(call: Callable[[], object]) -> float:
    """How long `call` takes. What it gives is let go after the clock has stopped."""
    started = time.perf_counter()
    given = call()
    seconds = time.perf_counter() - started
    del given
    return seconds


@dataclass(frozen=True)
class Rounds:
    """Seconds by way, one of each per round."""

    seconds: dict[str, list[float]]

    def median(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def ratio(self, way: str, floor: str) -> float:
        """Of the medians."""
        return self.median(way) / self.median(floor)

    def extra(self, way: str, floor: str) -> float:
        """Seconds that one median is over the other; 0 where it is not."""
        return max(0.0, self.median(way) - self.median(floor))

    def told(self, *ways: str) -> dict[str, Any]:
        """How many rounds there were, and for each way its median and quartiles in milliseconds."""
        shown: dict[str, Any] = {"rounds": min(len(self.seconds[way]) for way in ways)}
        for way in ways:
            taken = self.seconds[way]
            low, middle, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else taken * 3
            shown[f"{way}_ms"] = _shown(middle)
            shown[f"{way}_quartiles_ms"] = [_shown(low), _shown(high)]
        return shown


def interleaved(rounds: int, ways: dict[str, Callable[[], float]], *, warm: int = 2) -> Rounds:
    """Calls each way once per round, in turn; each gives the seconds that it took.

    Args:
        warm: so many rounds before do not count.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-warm, rounds):
        for way, measure in ways.items():
            taken = measure()
            if number >= 0:
                seconds[way].append(taken)
    return Rounds(seconds)


def _shown(seconds: float) -> float:
    return float(f"{seconds * 1000:.4g}")
