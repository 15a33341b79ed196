"""The gate before the remote: closed only for programs like those that compile faster than it answers."""

from __future__ import annotations

from torchtpu_cache.gate import RemoteGate
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
