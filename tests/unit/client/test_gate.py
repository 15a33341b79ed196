"""The gate before the remote: closed for programs that compile faster than it answers, and while it does not pay."""

from __future__ import annotations

import pytest

from torchtpu_cache.gate import CREDIT_SECONDS, MAX_DEBT_SECONDS, SHARE, Credit, RemoteGate
from torchtpu_cache_core.testing.clock import ManualClock


def gate(compile_seconds: float, round_trip_seconds: float, count: int = 16) -> RemoteGate:
    made = RemoteGate()
    for _ in range(count):
        made.compiled(compile_seconds, 1000)
        made.round_trip(round_trip_seconds)
    return made


def test_open_until_enough_is_known() -> None:
    assert not RemoteGate().closed(100)
    assert not gate(0.001, 0.050, count=2).closed(100)


def test_closed_while_compiles_are_cheaper_than_the_round_trip() -> None:
    assert gate(0.001, 0.050).closed(1000)
    assert not gate(0.060, 0.050).closed(1000)


def test_a_program_of_more_than_twice_the_size_passes() -> None:
    assert gate(0.001, 0.050).closed(2000)
    assert not gate(0.001, 0.050).closed(2001)


def test_one_slow_compile_opens_it() -> None:
    under_test = gate(0.001, 0.050)
    under_test.compiled(1.0, 900)
    assert not under_test.closed(900)


def test_one_passes_in_the_time_of_a_hundred_round_trips() -> None:
    clock = ManualClock()
    under_test = RemoteGate(clock)
    for _ in range(16):
        under_test.compiled(0.001, 1000)
        under_test.round_trip(0.050)
    clock.advance(4.9)
    assert under_test.closed(1000)
    clock.advance(0.2)
    assert not under_test.closed(1000)
    under_test.round_trip(0.050)
    assert under_test.closed(1000)


@pytest.mark.parametrize("late_seconds", [0.05, 0.5, 1.9])
@pytest.mark.parametrize("compile_seconds", [0.05, 0.5, 5.0])
def test_a_slow_tier_that_knows_nothing_costs_two_seconds_and_a_tenth(
    late_seconds: float, compile_seconds: float
) -> None:
    under_test, programs, asked = Credit(), 400, 0
    for _ in range(programs):
        if not under_test.used_up:
            asked += 1
            under_test.waited(late_seconds)
        under_test.compiled(compile_seconds)
    # The last one that was asked may overdraw.
    assert asked * late_seconds <= CREDIT_SECONDS + SHARE * programs * compile_seconds + late_seconds
    # And what it may cost is used: the tier could have something by now.
    assert asked >= min(programs, (CREDIT_SECONDS + SHARE * programs * compile_seconds) / late_seconds - 1)


def test_a_slow_tier_is_asked_as_long_as_its_hits_pay() -> None:
    paying, vain = Credit(), Credit()
    for _ in range(100):
        for _ in range(3):
            paying.waited(1.0)
            vain.waited(1.0)
        paying.hit(1.0, compile_seconds=60.0)
        vain.hit(1.0, compile_seconds=1.1)
        assert not paying.used_up
    assert vain.used_up


def test_what_was_spared_once_pays_for_two_seconds_only() -> None:
    under_test = Credit()
    under_test.hit(0.1, compile_seconds=3600.0)
    under_test.waited(1.9)
    assert not under_test.used_up
    under_test.waited(0.2)
    assert under_test.used_up
    under_test.compiled(1.1)
    assert not under_test.used_up


def test_a_machine_that_stood_still_in_a_wait_asks_again_soon() -> None:
    under_test = Credit()
    under_test.waited(3600.0)
    under_test.compiled(MAX_DEBT_SECONDS / SHARE)
    assert under_test.used_up
    under_test.compiled(1.0)
    assert not under_test.used_up
