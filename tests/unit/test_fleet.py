"""The generated fleet, and the tiers that the eviction benchmark drives with it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from bench._tiers import DiskTier, ExactLru, ServiceTier, Tier
from support.fleet import DAY, WEEK, Fleet, Program, Variant, _measured

WEEKS = 3


def fleet(variant: Variant = Variant.FLEET, seed: int = 7) -> Fleet:
    return Fleet(seed, weeks=WEEKS, scale=0.1, variant=variant)


def test_equal_arguments_give_equal_traces() -> None:
    assert fleet().service() == fleet().service()
    assert fleet().machine(1) == fleet().machine(1)
    assert fleet().machine(1) != fleet().machine(2)
    assert fleet().service() != fleet(seed=8).service()


def test_a_program_is_the_same_for_all_who_ask_for_it() -> None:
    one = fleet()
    seen: dict[int, Program] = {}
    for trace in (one.service(), one.machine(1), one.machine(2)):
        assert [request.seconds for request in trace] == sorted(request.seconds for request in trace)
        assert trace[-1].seconds < WEEKS * WEEK + DAY
        for request in trace:
            assert seen.setdefault(request.program.number, request.program) == request.program


def test_programs_are_what_is_measured() -> None:
    """What docs and drills know of a v5e: 39 s for 46.6 MB, compressed 15.6 times, and so on."""
    assert _measured(46.6) == pytest.approx((39.0, 15.6))
    assert _measured(0.07) == pytest.approx((0.022, 5.0))
    assert 0.0009 < _measured(0.005)[0] < 0.0011
    between = _measured(60.0)
    assert 39 < between[0] < 115
    assert 15.3 < between[1] < 15.6


def test_the_variants_differ_in_what_they_say() -> None:
    programs = {v: {r.program.number: r.program for r in fleet(v).machine(1)}.values() for v in Variant}
    per_byte = {v: [p.compile_seconds / p.size_bytes for p in programs[v] if p.size_bytes > 200_000] for v in Variant}
    assert max(per_byte[Variant.PLAIN]) == pytest.approx(min(per_byte[Variant.PLAIN]))
    assert max(per_byte[Variant.MEASURED]) / min(per_byte[Variant.MEASURED]) < 10
    spread = {v: statistics.stdev(per_byte[v]) / statistics.fmean(per_byte[v]) for v in Variant}
    assert spread[Variant.FLEET] > spread[Variant.MEASURED] > spread[Variant.PLAIN]
    assert max(p.compile_seconds for p in programs[Variant.FLEET]) <= 1800


@pytest.mark.parametrize("kind", [DiskTier, ServiceTier])
def test_without_cost_a_tier_is_lru(tmp_path: Path, kind: type[Tier]) -> None:
    """The disk tier, which looks at samples and frees ahead of need, comes close; the service does the very same."""
    trace = fleet().service()[:4000]
    limit_bytes = sum({r.program.number: kind.charge(r.program) for r in trace}.values()) // 8
    tier, exact = kind(tmp_path, limit_bytes, by_cost=False), ExactLru(limit_bytes, kind.charge)
    pairs = [(tier.ask(r.seconds, r.program), exact.ask(r.seconds, r.program)) for r in trace]
    tier.close()
    hits, expected = (sum(column) for column in zip(*pairs, strict=True))
    assert 100 < expected < len(trace) - 100
    assert hits == pytest.approx(expected, rel=0.1 if kind is DiskTier else 0.01)


@pytest.mark.parametrize("kind", [DiskTier, ServiceTier])
def test_a_tier_keeps_its_limit_and_what_it_stored(tmp_path: Path, kind: type[Tier]) -> None:
    tier = kind(tmp_path, 1 << 20, by_cost=True)
    small, huge = Program(1, 10_000, 5.0), Program(2, 2 << 20, 5.0)
    assert [tier.ask(float(n), p) for n, p in enumerate((small, small, huge, huge, small))] == [0, 1, 0, 0, 1]
    tier.close()
