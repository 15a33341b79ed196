"""What a remote's refusals tell of its size limit, and for how long."""

from __future__ import annotations

import pytest

from torchtpu_cache.sizelimit import SizeLimit
from torchtpu_cache_core.errors import EntryTooLarge
from torchtpu_cache_core.testing.clock import ManualClock

MB = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def limit(clock: ManualClock) -> SizeLimit:
    return SizeLimit(clock)


def passes(limit: SizeLimit, size_bytes: int) -> bool:
    try:
        limit.check(size_bytes)
    except EntryTooLarge:
        return False
    return True


@pytest.mark.parametrize(
    ("refused", "named", "most"),
    [
        (5 * MB, 2 * MB, 2 * MB),
        (5 * MB, None, 5 * MB - 1),
        (5 * MB, 9 * MB, 5 * MB - 1),
        (5 * MB, 5 * MB, 5 * MB - 1),
        (5 * MB, 0, 0),
    ],
)
def test_a_refusal_tells_the_largest_size_worth_a_try(
    limit: SizeLimit, refused: int, named: int | None, most: int
) -> None:
    assert passes(limit, 1 << 40)
    limit.refused(refused, named)
    assert passes(limit, most)
    assert not passes(limit, most + 1)
    assert not passes(limit, refused)


def test_the_lowest_refusal_counts_and_the_error_names_its_limit(limit: SizeLimit) -> None:
    limit.refused(5 * MB, 4 * MB)
    limit.refused(3 * MB, 2 * MB)
    limit.refused(9 * MB, 8 * MB)
    with pytest.raises(EntryTooLarge) as caught:
        limit.check(2 * MB + 1)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (2 * MB + 1, 2 * MB)


def test_a_refusal_is_forgotten_after_an_hour(limit: SizeLimit, clock: ManualClock) -> None:
    limit.refused(5 * MB, MB)
    clock.advance(3599)
    assert not passes(limit, 2 * MB)
    clock.advance(1)
    assert passes(limit, 2 * MB)
    limit.refused(5 * MB, 3 * MB)  # the operator raised it
    assert passes(limit, 2 * MB)


def test_two_breaks_count_as_a_refusal_for_ten_minutes(limit: SizeLimit, clock: ManualClock) -> None:
    limit.broke_off(5 * MB)
    assert passes(limit, 5 * MB)
    limit.broke_off(3 * MB)
    assert not passes(limit, 3 * MB)
    assert passes(limit, 3 * MB - 1)
    clock.advance(600)
    assert passes(limit, 5 * MB)
    limit.broke_off(5 * MB)
    assert passes(limit, 5 * MB)


def test_breaks_that_size_cannot_explain_do_not_count(limit: SizeLimit) -> None:
    for _ in range(10):
        limit.broke_off(10_000)  # so small that no limit cuts it
    for _ in range(10):
        limit.broke_off(3 * MB)
        limit.accepted(5 * MB)
    assert passes(limit, 3 * MB)
    limit.broke_off(3 * MB)
    limit.accepted(MB)  # smaller: proves nothing
    limit.broke_off(3 * MB)
    assert not passes(limit, 3 * MB)
