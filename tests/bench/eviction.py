"""Compile seconds saved per GB, against LRU, on a generated trace of a fleet.

The trace (tests/support/fleet.py says what it is made of, and from what) is weeks of programs being asked for by
training and serving jobs, sweeps, batches and people at work, with new releases of libtpu in between. Two tiers are
driven with it, each alone: a miss is a compile, and its result is stored; a hit saves the program's compile seconds.

- disk: what one machine of the fleet asks for, with the disk tier's own account, shards and eviction.
- service: what reaches the service, with its own index and admission.

LRU is the same code, told that every program compiles in no time, or the textbook's LRU, whichever saves more (of the
further traces below the textbook's alone). Every run begins empty. A size is a share of the bytes that are asked for
in a week, on average. Seconds saved per GB are the compile seconds of all hits over the size, so at one size the ratio
of two policies is that of their seconds. The figure is the geometric mean of the ratios over all seeds and four
sizes, from a sixteenth to half of a week. A whole week is told beside it: there LRU saves nearly all that an endless
tier would save (`of_possible`), and no policy can do better. Hit rates, by count and by seconds, are over all seeds.

The same is told of two other traces: `measured`, where compile seconds are what sizes tell, without any spread, and
`plain`, where every byte costs the same and nobody tries programs that never come back, so that nothing but recency and
repetition is left to go by.

The short form has a dozen jobs and one seed, with which the ratio may be anything between 0.8 and 2: it is only told.

Excluded: executables, HTTP and fsync; what a fetch from the next tier costs; machines that ask at the same moment.
"""

from __future__ import annotations

import concurrent.futures
import enum
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench._tiers import DiskTier, ExactLru, ServiceTier, Tier
from support.figures import Figure, Size
from support.fleet import WEEK, Fleet, Request, Variant

BAR: Final = 1.2
SHARES: Final = {"1/16 week": 1 / 16, "1/8 week": 1 / 8, "1/4 week": 1 / 4, "1/2 week": 1 / 2}
LARGE_SHARES: Final = {"a week": 1.0}
SEEDS: Final = (101, 102, 103)  # of the full form; the policy was chosen by looking at others
SHORT_SHARES: Final = {"1/8 week": 1 / 8}
TIERS: Final[dict[str, type[Tier]]] = {"disk": DiskTier, "service": ServiceTier}


class Policy(enum.Enum):
    OURS = "ours"
    SAME_CODE_LRU = "lru, same code"
    EXACT_LRU = "lru, exact"


@dataclass(frozen=True, slots=True)
class Run:
    """One way through one trace."""

    tier: str
    variant: Variant
    size: Size
    seed: int
    share: float
    policy: Policy


@dataclass
class Saved:
    """What a policy came to, perhaps over several traces."""

    asked: int = 0
    hits: int = 0
    asked_seconds: float = 0.0
    possible_seconds: float = 0.0
    saved_seconds: float = 0.0
    size_bytes: float = 0.0

    def count(self, request: Request, *, hit: bool, again: bool) -> None:
        """`again`: it was asked for before, so that an endless tier would have it."""
        self.asked += 1
        self.asked_seconds += request.program.compile_seconds
        if again:
            self.possible_seconds += request.program.compile_seconds
        if hit:
            self.hits += 1
            self.saved_seconds += request.program.compile_seconds

    def add(self, other: Saved) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def told(self) -> dict[str, float]:
        return {
            "hit_rate": round(self.hits / self.asked, 3),
            "hit_rate_by_seconds": round(self.saved_seconds / self.asked_seconds, 3),
            "of_possible": round(self.saved_seconds / self.possible_seconds, 3),
            "seconds_per_gb": round(self.saved_seconds / self.size_bytes * 1e9),
        }


def run(size: Size) -> Iterator[Figure]:
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        for tier in TIERS:
            for variant in Variant if size is Size.FULL else (Variant.FLEET,):
                name = f"eviction.{tier}" if variant is Variant.FLEET else f"eviction.{tier}.{variant.value}"
                print(f"  {name} ...", file=sys.stderr, flush=True)
                ratios, more = _compared(pool, tier, variant, size)
                mean = statistics.geometric_mean(ratios)
                if variant is Variant.FLEET and size is Size.FULL:
                    yield Figure.at_least(name, mean, "ratio", BAR, **more)
                else:
                    yield Figure.told(name, mean, "ratio", **more)


def _compared(
    pool: concurrent.futures.Executor, tier: str, variant: Variant, size: Size
) -> tuple[list[float], dict[str, Any]]:
    """The ratios by seed and size, and what explains them by size."""
    seeds = SEEDS if size is Size.FULL else SEEDS[:1]
    shares = SHORT_SHARES
    if size is Size.FULL:
        shares = SHARES | (LARGE_SHARES if variant is Variant.FLEET else {})
    policies = tuple(Policy) if variant is Variant.FLEET else (Policy.OURS, Policy.EXACT_LRU)
    runs = [
        Run(tier, variant, size, seed, share, policy)
        for seed in seeds
        for share in shares.values()
        for policy in policies
    ]
    came_to = dict(zip(runs, pool.map(driven, runs), strict=True))
    ratios: list[float] = []
    more: dict[str, Any] = {"seeds": len(seeds)}
    for shown, share in shares.items():
        ours, lru, here = Saved(), Saved(), []
        for seed in seeds:
            one, *others = (came_to[Run(tier, variant, size, seed, share, policy)] for policy in policies)
            better = max(others, key=lambda saved: saved.saved_seconds)
            here.append(one.saved_seconds / better.saved_seconds)
            ours.add(one)
            lru.add(better)
        ratios += here if shown in SHARES else []
        more[shown] = {"ratios": [round(each, 3) for each in here], "ours": ours.told(), "lru": lru.told()}
    return ratios, more


def driven(run: Run) -> Saved:
    """Drives one tier with one trace."""
    tier, trace = TIERS[run.tier], _trace(run.tier, run.variant, run.size, run.seed)
    limit_bytes = round(_week_bytes(tier, trace) * run.share)
    saved = Saved(size_bytes=limit_bytes)
    with tempfile.TemporaryDirectory(prefix="ttc-bench-") as folder:
        if run.policy is Policy.EXACT_LRU:
            opened: Tier | ExactLru = ExactLru(limit_bytes, tier.charge)
        else:
            opened = tier(Path(folder), limit_bytes, by_cost=run.policy is Policy.OURS)
        asked: set[int] = set()
        for request in trace:
            again = request.program.number in asked
            saved.count(request, hit=opened.ask(request.seconds, request.program), again=again)
            asked.add(request.program.number)
        opened.close()
    return saved


@functools.lru_cache(maxsize=2)
def _trace(tier: str, variant: Variant, size: Size, seed: int) -> list[Request]:
    weeks, scale = size.of(short=2, full=4), size.of(short=15, full=100) / 100
    fleet = Fleet(seed, weeks=weeks, scale=scale, variant=variant)
    return fleet.machine(0) if tier == "disk" else fleet.service()


def _week_bytes(tier: type[Tier], trace: list[Request]) -> float:
    """The bytes of different programs that are asked for in a week, on average, as the tier counts them."""
    weeks: dict[int, dict[int, int]] = {}
    for request in trace:
        program = request.program
        weeks.setdefault(int(request.seconds // WEEK), {})[program.number] = tier.charge(program)
    return statistics.fmean(sum(programs.values()) for programs in weeks.values())
