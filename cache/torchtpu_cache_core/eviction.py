"""Which entries go first, in every tier. Pure; every number is handed in.

A cache does best to keep what saves the most compile seconds per byte and per second of its stay. When an entry will be
asked for next is not known, but the longer nobody has, the longer it will take: at a guess, as long again. So

    worth = gain / (seconds since its last use + an hour),    gain = compile seconds / bytes,

and the least worth goes first. The hour keeps an order by gain among what is in use, whatever second it was used in. A
gain counts a quarter until the entry has been used again after it was stored, because most programs of people at work
never are. docs/decisions/010-worth-falls-with-idleness.md tells why it is not GreedyDual, and tests/bench/eviction.py
measures it.

Entries of one gain are ordered by their last use alone, at all times. Whoever keeps entries in order may therefore keep
one order per `gain_class`, rather than look at samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_COMPILE_SECONDS: Final = 86_400.0
"""What a writer claims beyond a day of compiling buys no longer stay."""

AGAIN_SECONDS: Final = 60.0
"""A use counts as another one when it is this much later than the store. Marks of use are no finer."""

SPARE_SHARE: Final = 8
"""Of candidates, the part that may go for what is not needed at once."""

CLASSES_PER_DOUBLING: Final = 2
LEAST_CLASS: Final = -80
"""What gains next to nothing: a millisecond for some gigabytes, or less."""

_UNUSED: Final = 0.25
_MIN_SIZE_BYTES: Final = 4096
"""No file takes less; otherwise a tiny entry would be worth more than any other for ever."""

_PATIENCE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Generic[T]):
    """An entry that may go.

    Args:
        item: whatever the caller knows it by.
        size_bytes: what is free again when it goes.
        stored_seconds: when it came.
        accessed_seconds: its last use; at first, when it came.
    """

    item: T
    size_bytes: int
    compile_seconds: float
    stored_seconds: float
    accessed_seconds: float


def gain(compile_seconds: float, size_bytes: int, *, used_again: bool) -> float:
    """Compile seconds that each byte of an entry saves when it is asked for; finite whatever its writer claims."""
    whole = min(compile_seconds, MAX_COMPILE_SECONDS) / max(size_bytes, _MIN_SIZE_BYTES)
    return whole if used_again else whole * _UNUSED


def is_used_again(stored_seconds: float, accessed_seconds: float) -> bool:
    return accessed_seconds - stored_seconds >= AGAIN_SECONDS


def worth(gain: float, accessed_seconds: float, now_seconds: float) -> float:
    """What the stay of an entry is worth; a last use in the future counts as now."""
    return gain / (max(0.0, now_seconds - accessed_seconds) + _PATIENCE_SECONDS)


def gain_class(gain: float) -> int:
    """A class of entries whose gains are alike within a factor of the square root of two; the greater, the dearer."""
    return max(LEAST_CLASS, math.floor(math.log2(gain) * CLASSES_PER_DOUBLING)) if gain > 0 else LEAST_CLASS


def least_gain(gain_class: int) -> float:
    """The least gain of a class; that of the lowest one stands for nothing at all."""
    return 2.0 ** (gain_class / CLASSES_PER_DOUBLING) if gain_class > LEAST_CLASS else 0.0


def worth_of(candidate: Candidate[T], now_seconds: float) -> float:
    used_again = is_used_again(candidate.stored_seconds, candidate.accessed_seconds)
    each = gain(candidate.compile_seconds, candidate.size_bytes, used_again=used_again)
    return worth(each, candidate.accessed_seconds, now_seconds)


def choose(
    candidates: Sequence[Candidate[T]],
    now_seconds: float,
    *,
    need_bytes: int,
    need_entries: int,
    spare_bytes: int = 0,
    spare_entries: int = 0,
) -> list[Candidate[T]]:
    """The candidates that go, least worth first (of equals the longest unused).

    Gives as few as free `need_bytes` and `need_entries`, or all of them where even that does not suffice. What is to be
    spare beyond need is taken from the least worth eighth only: candidates may be a sample, and those further up may be
    worth more than most of what was not looked at.
    """
    ranked = sorted(candidates, key=lambda c: (worth_of(c, now_seconds), c.accessed_seconds))
    victims: list[Candidate[T]] = []
    for candidate in ranked:
        is_needed = need_bytes > 0 or need_entries > 0
        is_wanted = need_bytes + spare_bytes > 0 or need_entries + spare_entries > 0
        if not is_needed and not (is_wanted and len(victims) < len(ranked) // SPARE_SHARE):
            break
        victims.append(candidate)
        need_bytes -= candidate.size_bytes
        need_entries -= 1
    return victims
