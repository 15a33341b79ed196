"""Corrupt entries, wherever they lie or travel: none reaches a loader, none reads as a miss, memory stays bounded.

**Attacked**: entry files of the disk tier with the manifest or machine's mark behind them, files in the spool, aliases
of programs; blobs, manifests and the SQLite index of a real service, while it runs and before it starts, read over HTTP
by the real client; and the wire between a real service and a real client, answers and uploads, heads and bodies.

**How**: accidents that no digest survives (flipped bits, cuts, growth, lost pages, exchanged parts, huge and small lies
about lengths, other versions), and forgeries with every digest made anew: whole entries of other keys, another target
or other components under the asked key, splices of two entries, lying payloads, and zstd bombs up to 10 GB, with
windows up to 2^41, within frames, behind frames and in front of them. `support/damage.py` says what must refuse each
kind, and `support/bombs.py` how the frames are made. All comes from seeds, which a fault names.

**Judged** by what the drill knows, which made every executable: most cases go straight to the store, and what it gives
out is compared with the key's one true executable; a share goes through a node with a `load` that keeps every byte
string that it is given. A changed entry that is served is a fault even where its executable is the right one, unless
what was changed are words that nothing binds (an unsigned manifest's writer and time, an HTTP date). A refused one must
be counted as a failure and not as a miss, must be out of the way, and must be replaced once the key is compiled again;
these are looked at for a share. What a service finds at its start it closes before anybody asks: it must count that.

**Excluded**: who can write where entries lie, or speaks for the service, can forge a consistent entry of the right key
with an executable of his choice. Where a manifest, a mark or an ETag that he left alone names the honest digest, it is
refused, and that is drilled. Where he may forge that too, nothing can tell until manifests are signed: such forgeries
are counted in `corruption.beyond` and not judged. An honest-looking 404 reads as a miss. The service unpacks nothing:
an upload whose payload lies is kept by it and refused by every reader.

Memory is the growth of the peak of the reading process (and of the service) beyond what its largest honest entry,
16 MB, had needed, over all cases of a medium: bombs, sparse files of up to a terabyte, and lengths of up to 2^64. The
slowest case is told with everything else that the machine did.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from support.figures import Figure, Size, seeded
from support.tally import FAULTS, Tally

_CASES: Final[dict[str, tuple[int, int]]] = {
    "disk": (1500, 75_000),
    "spool": (300, 6000),
    "aliases": (300, 6000),
    "service, live": (120, 4000),
    "service, starting": (60, 2400),
    "service, index": (2, 150),
    "wire, answers": (250, 6000),
    "wire, uploads": (60, 1000),
}
"""In the short form and in full."""

_SECONDS: Final = (120, 7200)
_PARALLEL: Final = 2
_SHORT_SEED: Final = 20261130
_GROWTH_MB: Final = 64
_SLOWEST_MS: Final = 10_000


def run(size: Size) -> Iterator[Figure]:
    """The figures of the drill."""
    # The short form is the same every time; the full one is another each time, and says its seed.
    seed = _SHORT_SEED if size is Size.SHORT else random.SystemRandom().randrange(1 << 32)
    with seeded(seed), ThreadPoolExecutor(_PARALLEL) as pool:
        jobs = [pool.submit(_attack, name, seed, size.of(*cases), size.of(*_SECONDS)) for name, cases in _CASES.items()]
        tallies = [job.result() for job in jobs]
    yield from _figures(tallies, seed, sum(size.of(*cases) for cases in _CASES.values()))


def _attack(medium: str, seed: int, cases: int, seconds: int) -> Tally:
    """What a worker says of one medium; a crash, if it says nothing."""
    command = [sys.executable, "-m", "drills._corruption_worker", medium, str(seed), str(cases)]
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=seconds, env=os.environ | {"PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return _died(medium, seed, f"it did not end within {seconds} s")
    if done.returncode:
        return _died(medium, seed, f"its process ended with {done.returncode}")
    return Tally.from_json(json.loads(done.stdout.splitlines()[-1]))


def _died(medium: str, seed: int, why: str) -> Tally:
    tally = Tally(medium, seed)
    tally.fault("crashes", medium, why)
    return tally


def _figures(tallies: list[Tally], seed: int, planned: int) -> Iterator[Figure]:
    tried = sum(tally.cases for tally in tallies)
    yield Figure.at_least(
        "corruption.tried",
        tried,
        "count",
        planned,
        seed=seed,
        media={tally.medium: tally.cases for tally in tallies},
        refused_as={tally.medium: dict(tally.refused_as.most_common()) for tally in tallies},
        true_all_the_same={tally.medium: tally.served_true for tally in tallies if tally.served_true},
        kinds={tally.medium: dict(sorted(tally.tried.items())) for tally in tallies},
    )
    checked = sum((tally.checked for tally in tallies), Counter[str]())
    faults = sum((tally.faults for tally in tallies), Counter[str]())
    shown = [f"{tally.medium}: {fault}" for tally in tallies for fault in tally.shown]
    for fault, what in FAULTS.items():
        everywhere = fault in ("reached_a_loader", "accepted", "crashes")
        of = tried if everywhere else checked[fault]
        found = {"shown": [one for one in shown if f": {fault}: " in one]} if faults[fault] else {}
        yield Figure.none_of(f"corruption.{fault}", faults[fault], of, what=what, **found)
    growth = {tally.medium: round(tally.rss_growth_bytes / 1e6, 1) for tally in tallies if tally.rss_growth_bytes}
    yield Figure.at_most("corruption.rss_growth", max(growth.values(), default=0), "MB", _GROWTH_MB, media=growth)
    slowest = {tally.medium: [round(tally.slowest_ms), tally.slowest_kind] for tally in tallies}
    worst = max(tally.slowest_ms for tally in tallies)
    yield Figure.at_most("corruption.slowest_ms", worst, "ms", _SLOWEST_MS, media=slowest)
    beyond, served = sum(tally.beyond_tried for tally in tallies), sum(tally.beyond_served for tally in tallies)
    yield Figure.told("corruption.beyond", served, f"of {beyond:,}", what="forgeries that only a signature could tell")
