"""Which entries go first: one table of gains and worths for every tier, victims, and the classes that keep an order."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.eviction import (
    AGAIN_SECONDS,
    CLASSES_PER_DOUBLING,
    LEAST_CLASS,
    Candidate,
    choose,
    gain,
    gain_class,
    is_used_again,
    least_gain,
    worth,
    worth_of,
)

NOW = 1_000_000.0
HOUR = 3600.0


def _candidate(
    item: str, size: int = 4096, cost: float = 1.0, idle: float = 0.0, used_again: bool = True
) -> Candidate[str]:
    used = NOW - idle
    stored = used - AGAIN_SECONDS if used_again else used
    return Candidate(item=item, size_bytes=size, compile_seconds=cost, stored_seconds=stored, accessed_seconds=used)


@pytest.mark.parametrize(
    ("candidates", "first"),
    [
        ([_candidate("cheap", cost=1), _candidate("dear", cost=2)], "cheap"),
        ([_candidate("large", size=1 << 20), _candidate("small", size=1 << 19)], "large"),
        ([_candidate("idle", idle=99.0), _candidate("in use", idle=98.0)], "idle"),
        (
            [_candidate("large and dear", size=1 << 20, cost=10), _candidate("small and cheap", cost=1)],
            "large and dear",
        ),
        ([_candidate("free", cost=0.0), _candidate("any", cost=0.1, idle=HOUR)], "free"),
        ([_candidate("free, idle", cost=0.0, idle=2), _candidate("free, in use", cost=0.0, idle=1)], "free, idle"),
        ([_candidate("from the future", cost=1.0, idle=-1e9), _candidate("dear", cost=2.0)], "from the future"),
        ([_candidate("a byte", size=1, cost=1), _candidate("a block", size=4096, cost=2)], "a byte"),
        ([_candidate("unused", cost=3.9, used_again=False), _candidate("used again", cost=1)], "unused"),
        ([_candidate("used again", cost=1), _candidate("unused", cost=4.1, used_again=False)], "used again"),
        ([_candidate("dear, idle", cost=2, idle=HOUR + 1), _candidate("cheap", cost=1)], "dear, idle"),
        ([_candidate("cheap", cost=1), _candidate("dear, idle", cost=2, idle=HOUR - 1)], "cheap"),
        ([_candidate("years", cost=1e9), _candidate("a day", cost=86_400.0, idle=-1)], "years"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_who_goes_first(candidates: list[Candidate[str]], first: str) -> None:
    for order in (candidates, candidates[::-1]):
        [victim] = choose(order, NOW, need_bytes=1, need_entries=0)
        assert victim.item == first


@pytest.mark.parametrize(
    ("need_bytes", "need_entries", "gone"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (4096, 0, 1),
        (4097, 0, 2),
        (0, 3, 3),
        (4096, 2, 2),
        (1 << 40, 0, 5),
        (0, 99, 5),
        (-5, 1, 1),
    ],
)
def test_no_more_go_than_needed(need_bytes: int, need_entries: int, gone: int) -> None:
    candidates = [_candidate(str(i), cost=i + 1) for i in range(5)]
    victims = choose(candidates, NOW, need_bytes=need_bytes, need_entries=need_entries)
    assert [v.item for v in victims] == [str(i) for i in range(gone)]


@pytest.mark.parametrize(
    ("need", "spare", "gone"),
    [
        ((0, 0), (0, 0), 0),
        ((4096, 0), (0, 0), 1),
        ((4096, 0), (4096, 0), 2),
        ((4096, 0), (99 * 4096, 0), 5),
        ((6 * 4096, 0), (99 * 4096, 0), 6),
        ((0, 1), (0, 2), 3),
        ((0, 1), (0, 99), 5),
        ((-9 * 4096, 2), (0, 1), 3),
        ((-9 * 4096, 0), (4096, 0), 0),
    ],
)
def test_what_is_only_to_be_spare_comes_from_the_least_worth_eighth(
    need: tuple[int, int], spare: tuple[int, int], gone: int
) -> None:
    candidates = [_candidate(str(i), cost=i + 1) for i in range(40)]
    victims = choose(
        candidates,
        NOW,
        need_bytes=need[0],
        need_entries=need[1],
        spare_bytes=spare[0],
        spare_entries=spare[1],
    )
    assert [v.item for v in victims] == [str(i) for i in range(gone)]


def test_the_unused_are_overtaken() -> None:
    """However dear: ten times the gain buys about ten times the idleness."""
    dear, cheap = (_candidate(name, cost=cost) for name, cost in (("dear", 10.0), ("cheap", 1.0)))
    for hours in range(1, 30):
        later = NOW + hours * HOUR
        fresh = Candidate(
            item="cheap", size_bytes=4096, compile_seconds=1.0, stored_seconds=later - 60, accessed_seconds=later
        )
        assert worth_of(cheap, later) < worth_of(dear, later)
        if worth_of(dear, later) < worth_of(fresh, later):
            break
    assert hours == 10


@pytest.mark.parametrize(("after", "again"), [(-1e9, False), (0.0, False), (59.0, False), (60.0, True), (1e9, True)])
def test_a_use_is_another_one_a_minute_later(after: float, again: bool) -> None:
    assert is_used_again(NOW, NOW + after) is again


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (1.0, 0),
        (math.sqrt(2) * 1.0001, 1),
        (2.0, CLASSES_PER_DOUBLING),
        (4.0, 2 * CLASSES_PER_DOUBLING),
        (0.24999, -2 * CLASSES_PER_DOUBLING - 1),
        (0.0, LEAST_CLASS),
        (-1.0, LEAST_CLASS),
        (1e-300, LEAST_CLASS),
        (86_400.0 / 4096, 8),
    ],
)
def test_classes(each: float, expected: int) -> None:
    assert gain_class(each) == expected


_COSTS = st.floats(1e-6, 1e9)
_SIZES = st.integers(0, 1 << 40)


@given(_COSTS, _SIZES, _COSTS, _SIZES, st.booleans())
def test_gains_of_a_class_are_alike_and_classes_in_order(
    cost: float, size: int, other_cost: float, other_size: int, again: bool
) -> None:
    one = gain(cost, size, used_again=again)
    other = gain(other_cost, other_size, used_again=not again)
    assert 0 < one < 100
    assert least_gain(gain_class(one)) <= one * (1 + 1e-9)
    if gain_class(one) == gain_class(other) > LEAST_CLASS:
        assert one / other == pytest.approx(1, rel=math.sqrt(2) - 1 + 1e-9)
    if one < other:
        assert gain_class(one) <= gain_class(other)


@given(st.floats(1e-12, 100), st.floats(0, 1e10), st.floats(0, 1e10), st.floats(0, 1e10))
def test_of_one_gain_the_longest_unused_goes_first_at_all_times(
    each: float, used: float, other_used: float, now: float
) -> None:
    """So an order by last use within a class needs no change as time goes by."""
    earlier, later = sorted((used, other_used))
    assert worth(each, earlier, now) <= worth(each, later, now)
