"""What a part of the corruption drill saw: counts by kind, faults with what shows them again, time and memory."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self

from support.procwatch import resident_bytes

FAULTS: Final = {
    "reached_a_loader": "bytes that are not the key's executable were given to a loader, or out for one",
    "accepted": "changed bytes were taken for the entry, though the executable in them was the right one",
    "counted_as_miss": "a corrupt entry read as no entry",
    "crashes": "something else than a store's error came out, or a process died",
    "not_counted": "a corrupt entry was refused and no failure counted",
    "not_set_aside": "a corrupt entry still stood in its place afterwards",
    "not_replaced": "the key had no sound entry after it was compiled again",
}
_SHOWN_FAULTS: Final = 5
_SAID_EVERY_SECONDS: Final = 10.0


@dataclass(slots=True)
class Tally:
    """Counts of one medium. What is in `beyond` is no case: forgeries that nothing can tell yet.

    Args:
        medium: what was attacked.
        seed: with which everything comes again.
    """

    medium: str
    seed: int
    tried: Counter[str] = field(default_factory=Counter)
    refused_as: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    served_true: int = 0
    checked: Counter[str] = field(default_factory=Counter)
    beyond_tried: int = 0
    beyond_served: int = 0
    slowest_ms: float = 0.0
    slowest_kind: str = ""
    rss_growth_bytes: int = 0
    _said: float = 0.0

    @property
    def cases(self) -> int:
        """How many were tried so far."""
        return sum(self.tried.values())

    @contextmanager
    def case(self, kind: str, *, timed: bool = True) -> Iterator[None]:
        """One damaged thing, tried and timed; what escapes is a crash, and goes no further."""
        with self.cases_at_once([kind], timed=timed):
            yield

    @contextmanager
    def cases_at_once(self, kinds: list[str], *, timed: bool = True) -> Iterator[None]:
        """Several, tried together: each counts, and for the time the mean of them."""
        self.tried.update(kinds)
        kind = kinds[0]
        started = time.perf_counter()
        with self.unharmed(kind):
            yield
        taken = (time.perf_counter() - started) * 1000 / len(kinds)
        if timed and taken > self.slowest_ms:
            self.slowest_ms, self.slowest_kind = taken, kind

    @contextmanager
    def unharmed(self, kind: str) -> Iterator[None]:
        """Something honest after a case; what escapes is a crash, and goes no further."""
        try:
            yield
        except Exception as error:
            self.fault("crashes", kind, f"{type(error).__name__}: {error}")

    def fault(self, what: str, kind: str, detail: str = "") -> None:
        """Counts one of FAULTS."""
        assert what in FAULTS
        self.faults[what] += 1
        if len(self.shown) < _SHOWN_FAULTS:
            self.shown.append(f"{what}: {kind} (seed {self.seed}, case {self.cases}) {detail}"[:300])

    def refused(self, reason: str) -> None:
        """A case was refused, for this reason."""
        self.refused_as[reason] += 1

    def check(self, what: str, kind: str, holds: bool) -> None:
        """Counts that a case was looked at for a fault, and the fault where it is one."""
        self.checked[what] += 1
        if not holds:
            self.fault(what, kind)

    def say(self, of: int) -> None:
        """Progress on standard error, now and then."""
        if time.monotonic() - self._said > _SAID_EVERY_SECONDS:
            self._said = time.monotonic()
            print(f"  {self.medium}: {self.cases:,} of {of:,}", file=sys.stderr, flush=True)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        counters = {name: Counter(fields[name]) for name in ("tried", "refused_as", "faults", "checked")}
        return cls(**fields | counters)


class PeakMemory:
    """How much resident memory a process needs beyond its peak so far.

    Args:
        pid: of the process; None for this one.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._before = resident_bytes(self._pid)[1]

    def growth_bytes(self) -> int:
        return resident_bytes(self._pid)[1] - self._before
