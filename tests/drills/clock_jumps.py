"""Wall clocks that jump a year ahead, back to 1970 and about, under nodes, jobs and a service.

Method. Nodes of this process get a clock of ours whose wall time jumps while its monotonic time runs on: one evicts all
the time, one keeps entries that must stay hits, through jumps in both directions. A job and a service run in processes
of their own under a preloaded library that moves what they read from the kernel, while they run and before they start;
times that the file system stamps stay real, as on a machine whose clock was set. Every answer is compared byte by byte.
Waits (connections, the breaker, the spool, locks) are monotonic by design; that they are shows in what is added.

Excluded: leases, which are not there yet. CI needs a C compiler for the preloaded library.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.clean import clean_folder
from support.figures import Figure, Size
from support.rig import median_or_nan, private, program, rigged
from support.served import Served, launch
from support.wallclock import YEAR, JumpingClock, PreloadedClock, preloaded
from torchtpu_cache.counters import Tier
from torchtpu_cache_core.testing.entries import entry_for

ADDED_MS: Final = 50.0


def _jumps() -> list[tuple[str, float]]:
    """Names, and how far off the clock is then."""
    now = time.time()
    return [
        *(("right", 0.0), ("a year ahead", YEAR), ("right again", 0.0), ("1970", 10.0 - now)),
        *(("ahead after 1970", YEAR), ("an hour back", -3600.0)),
    ]


def run(size: Size) -> Iterator[Figure]:
    with clean_folder(in_memory=True) as folder:
        yield from _handed_in(folder, size)
        try:
            clock = PreloadedClock(private(folder / "clock"))
        except (OSError, subprocess.CalledProcessError) as error:
            more = {"capability: C compiler": str(error)}
            yield Figure("clock_jumps.preloaded", 0, "count", ">= 1", os.environ.get("CI") != "true", more)
            return
        with contextlib.closing(clock):
            yield from _job(folder, clock)
            yield from _service(folder, clock, size)


def _handed_in(folder: Path, size: Size) -> Iterator[Figure]:
    """Nodes with a clock of ours: one that evicts all the time, one whose entries must stay hits."""
    clock = JumpingClock()
    evicting, keeping = private(folder / "clock-evicting"), private(folder / "clock-keeping")
    taken: list[float] = []
    missed: list[str] = []
    broken: dict[str, Any] = {}
    with (
        rigged(evicting, clock=clock, memory=True, limit_bytes=1 << 20) as small,
        rigged(keeping, clock=clock, memory=True) as node,
    ):
        for round_, (name, offset) in enumerate(_jumps()):
            clock.offset_seconds = offset
            for number in range(size.of(60, 300)):
                taken.append(small.ask(program(f"{name} {number}"))[0])
            small.node.flush()
            taken.append(node.ask(program(f"kept {round_}"))[0])
            node.node.flush()
            with rigged(keeping, clock=clock, memory=True) as fresh:
                missed += [
                    f"{i} at {name}" for i in range(round_ + 1) if fresh.ask(program(f"kept {i}"))[1] is not Tier.DISK
                ]
                broken |= fresh.totals()["failures"]
        assert small.disk is not None
        held = small.disk.gc().size_bytes
        broken |= small.totals()["failures"] | node.totals()["failures"]
        wrong = small.wrong + small.lost + node.wrong + node.lost
    more = {"worst": round(max(taken), 2), "of": len(taken)}
    yield Figure.at_most("clock_jumps.adds", median_or_nan(taken), "ms", ADDED_MS, **more)
    yield Figure.none_of("clock_jumps.wrong_or_lost", wrong, len(taken))
    yield Figure.none_of("clock_jumps.hits_lost", len(missed), sum(range(1, 7)), names=missed)
    yield Figure.none_of("clock_jumps.failures", sum(broken.values()), len(taken), kinds=broken)
    yield Figure.at_most("clock_jumps.evicting_tier_holds", held, "bytes", 1 << 20)


@dataclass
class _JobProcess:
    process: subprocess.Popen[str]

    def ask(self, name: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def _job_process(folder: Path, clock: PreloadedClock) -> Iterator[_JobProcess]:
    tests = Path(__file__).parents[1]
    environ = preloaded(clock.environment) | {"PYTHONPATH": str(tests)}
    process = subprocess.Popen(
        [sys.executable, "-m", "support.clockjob", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        yield _JobProcess(process)
    finally:
        process.communicate(timeout=30)


def _job(folder: Path, clock: PreloadedClock) -> Iterator[Figure]:
    """A job whose clock jumps while it runs, and another that starts after the last jump."""
    home = private(folder / "clock-job")
    wrong, tiers, names = 0, [], []
    with _job_process(home, clock) as job:
        for name, offset in _jumps():
            clock.jump(int(offset))
            said = job.ask(f"job {name}")
            names.append(f"job {name}")
            clock_moved = abs(said["seconds"] - (time.time() + offset)) < 60
            wrong += not said["right"] or not clock_moved or said["tier"] != Tier.COMPILED
    clock.jump_to(100)
    with _job_process(home, clock) as job:
        for name in names:
            said = job.ask(name)
            wrong += not said["right"]
            tiers.append(said["tier"])
    clock.jump(0)
    hits = tiers.count(Tier.DISK)
    yield Figure.none_of("clock_jumps.job_wrong", wrong, 2 * len(names))
    yield Figure.at_least("clock_jumps.job_hits_in_1970", hits, f"of {len(names)}", len(names))


def _service(folder: Path, clock: PreloadedClock, size: Size) -> Iterator[Figure]:
    """A service whose clock jumps while it stores, evicts, deletes and serves; and one that starts in 1970."""
    served = launch(folder / "clock-service", "--max-size", "4MB", environ=preloaded(clock.environment))
    wrong: list[str] = []
    milliseconds: list[float] = []
    try:
        for name, offset in _jumps():
            clock.jump(int(offset))
            for number in range(size.of(8, 60)):
                entry = entry_for(f"clock {name} {number}", size_bytes=100_000)
                started = time.perf_counter()
                found = [served.put(entry).status, served.get(entry).status]
                milliseconds.append((time.perf_counter() - started) * 1000)
                if number % 4 == 0:
                    found += [served.ask("DELETE", f"/v1/default/entries/{entry.key}").status]
                wrong += [] if found[:2] == [201, 200] and found[2:] in ([], [204]) else [f"{name}: {found}"]
            found = [served.ask("GET", path).status for path in ("/readyz", "/v1/default/entries", "/metrics")]
            wrong += [] if found == [200] * 3 else [f"{name}: {found}"]
        last = entry_for("the last one", size_bytes=1000)
        wrong += [] if served.put(last).status == 201 else ["the last put"]
        clock.jump_to(100)
        again = _restarted(served, clock)
        served = again
        wrong += [] if served.get(last).status == 200 else ["a get after a start in 1970"]
    finally:
        clock.jump(0)
        served.kill()
    more = {"median_ms": round(median_or_nan(milliseconds), 2), "findings": wrong[:5]}
    yield Figure.none_of("clock_jumps.service_wrong", len(wrong), len(milliseconds), **more)


def _restarted(served: Served, clock: PreloadedClock) -> Served:
    served.stop()
    return launch(served.data_dir, "--max-size", "4MB", environ=preloaded(clock.environment))
