"""Figures: what a drill or a benchmark measured, the bar it is held to, and whether it holds."""

from __future__ import annotations

import contextlib
import enum
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self


class Size(enum.Enum):
    """How long a campaign may take: SHORT is its form in `make test`, FULL that of `make drills` and `make bench`."""

    SHORT = "short"
    FULL = "full"

    def of(self, short: int, full: int) -> int:
        """The count for this size."""
        return short if self is Size.SHORT else full


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    Args:
        name: dotted words, the same in every run.
        value: what was measured; NaN where it could not be.
        unit: of the value and the bar (`ratio`, `ms`, `count`, `bytes`, ...).
        bar: what it is held to, as people read it (`<= 1.15`); empty where it is only told.
        ok: whether it holds.
        more: what explains it (rounds, spread, parts), plain JSON values.
    """

    name: str
    value: float
    unit: str
    bar: str
    ok: bool
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def at_most(cls, name: str, value: float, unit: str, bar: float, **more: Any) -> Self:
        """A figure that must not be over its bar."""
        return cls(name, value, unit, f"<= {_bar(bar)}", value <= bar, more)

    @classmethod
    def at_least(cls, name: str, value: float, unit: str, bar: float, **more: Any) -> Self:
        """A figure that must not be under its bar."""
        return cls(name, value, unit, f">= {_bar(bar)}", value >= bar, more)

    @classmethod
    def none_of(cls, name: str, found: int, of: int, **more: Any) -> Self:
        """A count of faults, none of which may be, out of so many tries; no try at all proves nothing."""
        return cls(name, found, f"of {of:,}", "= 0", found == 0 and of > 0, more)

    @classmethod
    def told(cls, name: str, value: float, unit: str, **more: Any) -> Self:
        """A figure that nothing is held against."""
        return cls(name, value, unit, "", True, more)

    def to_json(self, **around: Any) -> str:
        """One line: `name`, `value`, `unit`, `bar` (null where there is none), `ok`, what explains it, and `around`."""
        value = None if math.isnan(self.value) else _rounded(self.value)
        shown = {"name": self.name, "value": value, "unit": self.unit, "bar": self.bar or None, "ok": self.ok}
        return json.dumps(shown | self.more | around)


Campaign = Callable[[Size], Iterator[Figure]]
"""`run(size)` of a module in tests/drills or tests/bench: yields each figure as soon as it is known."""


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """For a module that takes another seed each time: what fails in the block has it as its attribute `seed`."""
    try:
        yield
    except Exception as error:
        error.seed = seed  # type: ignore[attr-defined]
        raise


def _bar(bar: float) -> str:
    return f"{bar:,.0f}" if bar == int(bar) else f"{bar:g}"


def _rounded(value: float) -> float:
    """Four significant digits; counts as they are."""
    if isinstance(value, int) or value == int(value):
        return int(value)
    return round(value, 3 - math.floor(math.log10(abs(value))))
