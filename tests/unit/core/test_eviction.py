"""GreedyDual: tables, and a model with an explicit L per entry."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.eviction import MAX_POINTS, RESOLUTION_SECONDS, Candidate, Inflation, choose, worth


def _candidate(item: str, size: int = 4096, cost: float = 1.0, used: float = 0.0) -> Candidate[str]:
    return Candidate(item=item, size_bytes=size, compile_seconds=cost, accessed_seconds=used)


@pytest.mark.parametrize(
    ("candidates", "first"),
    [
        ([_candidate("cheap", cost=1), _candidate("dear", cost=2)], "cheap"),
        ([_candidate("large", size=1 << 20), _candidate("small", size=1 << 19)], "large"),
        ([_candidate("old", used=1.0), _candidate("new", used=2.0)], "old"),
        (
            [_candidate("dear but large", size=1 << 20, cost=10), _candidate("cheap but small", cost=1)],
            "dear but large",
        ),
        ([_candidate("free", cost=0.0, used=9.0), _candidate("any", cost=0.1)], "free"),
        ([_candidate("from the future", used=1e12, cost=1.0), _candidate("dear", cost=2.0)], "from the future"),
        ([_candidate("a byte", size=1, cost=1), _candidate("a block", size=4096, cost=2)], "a byte"),
    ],
)
def test_who_goes_first(candidates: list[Candidate[str]], first: str) -> None:
    for order in (candidates, candidates[::-1]):
        [victim] = choose(order, Inflation(), 100.0, need_bytes=1, need_entries=0)
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
    victims = choose(candidates, Inflation(), 100.0, need_bytes=need_bytes, need_entries=need_entries)
    assert [v.item for v in victims] == [str(i) for i in range(gone)]


def test_the_unused_are_overtaken() -> None:
    inflation = Inflation()
    dear = _candidate("dear", cost=10.0, used=0.0)
    for round_ in range(1, 30):
        now = round_ * 100.0
        [victim] = choose([dear, _candidate("cheap", cost=1.0, used=now)], inflation, now, need_bytes=1, need_entries=0)
        if victim is dear:
            break
    assert round_ in (10, 11)


def test_steps_of_inflation() -> None:
    inflation = Inflation()
    assert inflation.at(5.0) == 0.0
    inflation.rise(100.0, 1.0)
    inflation.rise(200.0, 2.0)
    inflation.rise(210.0, 2.5)  # within the resolution: the same point
    inflation.rise(300.0, 1.0)  # never falls
    inflation.rise(150.0, 9.0)  # never rewrites the past
    assert inflation.points == ((100.0, 1.0), (200.0, 2.5))
    assert [inflation.at(t) for t in (99.9, 100.0, 199.9, 200.0, 1e12)] == [0.0, 1.0, 1.0, 2.5, 2.5]


@given(st.lists(st.tuples(st.floats(0, 1e10), st.floats(0, 1e6)), max_size=400))
def test_inflation_is_bounded_and_rises(points: list[tuple[float, float]]) -> None:
    inflation = Inflation()
    for seconds, level in points:
        inflation.rise(seconds, level)
    kept = inflation.points
    assert len(kept) <= MAX_POINTS
    assert list(kept) == sorted(kept)
    assert [level for _, level in kept] == sorted({level for _, level in kept})
    assert Inflation(kept).points == kept


def test_thinning_reaches_far_back() -> None:
    inflation = Inflation()
    for i in range(5000):
        inflation.rise(i * RESOLUTION_SECONDS, float(i + 1))
    assert inflation.at(5000 * RESOLUTION_SECONDS) == 5000.0
    recent = inflation.at(4980 * RESOLUTION_SECONDS)
    assert 4975.0 <= recent <= 4981.0
    assert inflation.points[0][0] == 0.0
    assert inflation.at(4800 * RESOLUTION_SECONDS) > 4000.0


def test_it_agrees_with_the_textbook() -> None:
    """GreedyDual with an explicit H per entry, set at each use, against ours from times alone."""
    chance = random.Random(1)
    inflation, level = Inflation(), 0.0
    textbook: dict[str, float] = {}
    ours: dict[str, Candidate[str]] = {}
    sizes = {f"e{i}": chance.randrange(4096, 1 << 20) for i in range(60)}
    costs = {name: chance.uniform(0.1, 60) for name in sizes}
    for step in range(3000):
        now = step * (RESOLUTION_SECONDS + 1)
        name = f"e{min(59, int(chance.expovariate(0.06)))}"
        if name not in ours and len(ours) == 20:
            expected = min(textbook, key=lambda n: (textbook[n], ours[n].accessed_seconds))
            [victim] = choose(list(ours.values()), inflation, now, need_bytes=1, need_entries=1)[:1]
            # Old levels are remembered coarsely, so one that is nearly the least worth will do.
            assert textbook[victim.item] <= textbook[expected] * 1.1
            level = max(level, textbook[victim.item])
            del textbook[victim.item], ours[victim.item]
        textbook[name] = level + costs[name] / sizes[name]
        ours[name] = _candidate(name, sizes[name], costs[name], now)
        assert worth(ours[name], inflation, now) == pytest.approx(textbook[name], rel=0.1)
