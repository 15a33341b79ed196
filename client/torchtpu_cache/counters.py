"""What a node saw: hits and misses by tier, failures by tier and kind, compiles, bypasses by reason.

A backend's failure is never counted as a miss, a miss never as a failure. Labels are bounded words, free of keys,
paths and tokens.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


class Tier(enum.StrEnum):
    """Where an executable came from."""

    MEMORY = "memory"
    DISK = "disk"
    REMOTE = "remote"
    COMPILED = "compiled"


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    missed: int = 0
    compiled: int = 0
    compile_failures: int = 0
    compile_seconds: float = 0.0
    seconds_saved: float = 0.0
    hits: Counter[str] = field(default_factory=Counter)
    tier_misses: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    bypassed: Counter[str] = field(default_factory=Counter)
    published: Counter[str] = field(default_factory=Counter)
    not_published: Counter[str] = field(default_factory=Counter)


class Counters:
    """Thread-safe totals since the node was made."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards _totals
        self._totals = _Totals()

    def request(self) -> None:
        """A program was asked for."""
        with self._lock:
            self._totals.requests += 1

    def hit(self, tier: Tier, seconds_saved: float) -> None:
        """An executable came from `tier`, and was loaded where the caller loads. Savings may be negative."""
        with self._lock:
            self._totals.hits[tier] += 1
            self._totals.seconds_saved += seconds_saved

    def miss(self, tier: Tier) -> None:
        """`tier` answered that it has no entry."""
        with self._lock:
            self._totals.tier_misses[tier] += 1

    def missed(self) -> None:
        """No tier had what was asked for, or none could be asked: it is compiled, and was not bypassed.

        So requests are hits, missed and bypassed together, and those still being looked up.
        """
        with self._lock:
            self._totals.missed += 1

    def failure(self, where: str, kind: str) -> None:
        """A tier, the spool or a loader failed: neither hit nor miss."""
        with self._lock:
            self._totals.failures[f"{where}.{kind}"] += 1

    def skipped(self, tier: Tier, reason: str) -> None:
        """A tier was not asked."""
        with self._lock:
            self._totals.skipped[f"{tier}.{reason}"] += 1

    def bypass(self, reason: str) -> None:
        """A request was compiled without the cache."""
        with self._lock:
            self._totals.bypassed[reason] += 1

    def compiled(self, compile_seconds: float) -> None:
        """XLA gave an executable."""
        with self._lock:
            self._totals.compiled += 1
            self._totals.compile_seconds += compile_seconds

    def compile_failed(self) -> None:
        """XLA gave none."""
        with self._lock:
            self._totals.compile_failures += 1

    def published(self, status: str) -> None:
        """The remote answered an upload: `created`, `same` or `conflict`."""
        with self._lock:
            self._totals.published[status] += 1

    def not_published(self, reason: str) -> None:
        """A compiled executable is not shared, and why."""
        with self._lock:
            self._totals.not_published[reason] += 1

    def snapshot(self) -> dict[str, Any]:
        """All totals as plain JSON values, the names sorted."""
        with self._lock:
            result: dict[str, Any] = {}
            for name in _Totals.__slots__:
                value = getattr(self._totals, name)
                if isinstance(value, Counter):
                    value = {str(label): count for label, count in sorted(value.items())}
                result[name] = value
        return result
