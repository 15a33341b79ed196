"""The second run of a JAX job with this cache, against the same job with JAX's own directory cache.

The job is examples/jax_train.py, unmodified: a transformer's training step, unrolled, and ten steps of it on the CPU.
One way has `TORCHTPU_CACHE_JAX=1` and a folder of ours, the other `JAX_COMPILATION_CACHE_DIR` and no minimum of compile
time or size. Both were run before, so that nothing compiles, Python's bytecode included. Every run is a new process;
runs are interleaved, and in every other round the order is turned round. What is held to the bar is what a user waits
for, the whole process from its start to its exit: the median over rounds of ours by theirs. Beside it stand the
processor time of the process alike, and the seconds inside JAX's compile calls (its key, look-up, decompression and
load included).
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from support.clean import clean_folder
from support.figures import Figure, Size

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = ROOT / "examples" / "jax_train.py"
RUNNER: Final = Path(__file__).with_name("_jax_runner.py")
BAR: Final = 1.05
OURS, THEIRS = "ours", "jax"


@dataclass(frozen=True)
class Run:
    """One process: its seconds, its processor's seconds, and those inside compile calls."""

    wall: float
    processor: float
    compile_calls: float


def run(size: Size) -> Iterator[Figure]:
    """The figures."""
    rounds = size.of(2, 15)
    with clean_folder() as folder:
        for way in (OURS, THEIRS) * size.of(1, 2):
            _run(way, folder)
        found: dict[str, list[Run]] = {OURS: [], THEIRS: []}
        for number in range(rounds):
            for way in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
                found[way].append(_run(way, folder, warm=True))
            last = " ".join(f"{way} {runs[-1].wall:.2f} s" for way, runs in found.items())
            print(f"  round {number + 1} of {rounds}: {last}", file=sys.stderr, flush=True)
    parts = {
        part: [getattr(mine, part) / getattr(other, part) for mine, other in zip(*found.values(), strict=True)]
        for part in ("wall", "processor", "compile_calls")
    }
    ratios = parts["wall"]
    yield Figure.at_most(
        "jax_second_run",
        statistics.median(ratios),
        "ratio",
        BAR,
        rounds=rounds,
        spread=[round(statistics.quantiles(ratios, n=4)[index], 3) for index in (0, 2)],
        ours_seconds=_median(found[OURS], "wall"),
        jax_seconds=_median(found[THEIRS], "wall"),
    )
    for part in ("processor", "compile_calls"):
        yield Figure.told(
            f"jax_second_run.{part}",
            statistics.median(parts[part]),
            "ratio",
            ours_seconds=_median(found[OURS], part),
            jax_seconds=_median(found[THEIRS], part),
        )


def _median(runs: list[Run], part: str) -> float:
    return round(statistics.median(getattr(each, part) for each in runs), 4)


def _run(way: str, folder: Path, *, warm: bool = False) -> Run:
    """RuntimeError where a warm run compiled something."""
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "TORCHTPU_CACHE_DIR": str(folder / OURS)}
    if way == OURS:
        environ |= {"TORCHTPU_CACHE_JAX": "1"}
    else:
        environ |= {
            "JAX_COMPILATION_CACHE_DIR": str(folder / THEIRS),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode, as JAX has
    report = folder / "report.json"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, str(RUNNER), str(report), str(EXAMPLE)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=300)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"the job failed: {done.stderr[-2000:]}")
    told = json.loads(report.read_text())
    if warm and way == OURS and (told["stats"]["compiled"] or told["stats"]["hits"] != {"disk": told["calls"]}):
        raise RuntimeError(f"a warm run was not warm: {told['stats']}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(wall, processor, told["seconds"])
