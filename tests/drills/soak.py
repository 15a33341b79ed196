"""Half an hour of everything at once: memory, descriptors, threads, helper processes and temporary files stay flat.

Three jobs (`_soak_client`) run on two machines, that is, cache folders. The two jobs of the first machine use a service
that runs all the time; the job of the second one uses a service that is restarted every other minute, by SIGTERM and by
SIGKILL in turn. Each job is a process with a node as `assemble` makes it (memory, disk, remote behind its breaker,
spool, canonicaliser with aliases) and two threads, which ask for real modules of tests/data/corpus under many targets
(some often, most seldom), for programs that nobody has seen before and that the canonicaliser must parse, and, in one
job, for programs that XLA compiles for the CPU; which delete entries here and at the service, damage files of the disk
tier, and meet compiles that fail and executables that do not load. All limits are small, so that memory, disk and
services evict all the time. Meanwhile a vandal breaks connections, cancels uploads and downloads, and damages blobs.

Compiles are those of a made-up compiler, whose executables tell each request from every other: each answer is compared
with what it must be. It takes no time, so a thread waits for its job's writes after each tenth compile: else they would
fall ever more behind, and the bounded queue of what waits for the disk would grow. All else is real: processes,
sockets, files, XLA.

Every few seconds /proc is asked what each process holds, and each folder what temporary files it has. A growth is that
of the median of the last third of the run over the median of the first third, after a warm-up. Bars:

- Memory, of each process, and of its helper processes together: 10 %; growth of less than 6 MB is none, for allocators
  return memory as they like.
- Descriptors: 4, threads: 2. A service keeps blobs open that are asked for often: each blob that is there may be open
  once beside these; one that is gone, or open twice, counts. Connections, readers of the index (8, with two descriptors
  each) and the service's threads (16) are pooled, and come and go with the load. In the short form, which sees these
  pools fill, 24 and 8: what leaked with each of its thousand operations would be far beyond. Helper processes: 0.
- Temporary files: none once all have ended; no error, no bad read, nothing left in a spool.

What was to happen and did not (say, no eviction) is a fault of the full form too: `soak.missed`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from drills._soak_client import Job
from drills._soak_load import Standing, Vandal
from support.campaign import TESTS
from support.clean import clean_folder
from support.figures import Figure, Size
from support.procwatch import Held, held_by
from support.waiting import wait_until

SEED: Final = 1_130
_MB: Final = 1e6
_FLOOR_BYTES: Final = 6_000_000
_MOST_GROWTH: Final = 0.10
_TEMPORARY: Final = re.compile(r"\.(tmp-|writing-|note-|machine\.key-).*|\..*\.tmp")
_KEPT_OPEN: Final = re.compile(r".*/blobs/sha256/[0-9a-f]{2}/[0-9a-f]{64}")
_MODULES: Final = (
    "jax_add",
    "jax_matmul_gelu",
    "jax_mlp4_sgd_step",
    "jax_scan24_grad",
    "torch_mlp_fwd",
    "torch_llama2_inf",
)
_LIMITS: Final = {"disk_bytes": 2 << 20, "memory_bytes": 2 << 20}
_SERVICE_BYTES: Final = 2 << 20
_FEWEST_SAMPLES: Final = 30
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How long all takes, in seconds, and at which pace; the bars of what pools may still grow by."""

    run: float
    warm_up: float
    sample: float
    restart: float
    pause: float
    variants: int
    descriptors: int
    threads: int


_PLANS: Final = {
    Size.SHORT: _Plan(
        run=12.0, warm_up=4.0, sample=0.25, restart=5.0, pause=0.005, variants=300, descriptors=24, threads=8
    ),
    Size.FULL: _Plan(
        run=1800.0, warm_up=300.0, sample=5.0, restart=120.0, pause=0.03, variants=600, descriptors=4, threads=2
    ),
}


@dataclass(frozen=True, slots=True)
class _Sample:
    seconds: float
    held: dict[str, Held]
    temporary: int


class _Soak:
    """All processes of a run, and what was seen of them."""

    def __init__(self, folder: Path, plan: _Plan, stack: ExitStack) -> None:
        self._folder = folder
        self._plan = plan
        self._stop = folder / "stop"
        self._over = threading.Event()
        stack.callback(self._over.set)
        self.steady = Standing(folder / "steady", _SERVICE_BYTES)
        stack.callback(self.steady.kill)
        self.moody = Standing(folder / "moody", _SERVICE_BYTES)
        stack.callback(self.moody.kill)
        (folder / "results").mkdir()
        self._clients = {
            name: self._client(name, machine, service, number)
            for number, (name, machine, service) in enumerate(
                (
                    ("job 1", "machine 1", self.steady),
                    ("job 2", "machine 1", self.steady),
                    ("job 3", "machine 2", self.moody),
                )
            )
        }
        for client in self._clients.values():
            stack.callback(_killed, client)
        self.vandal = Vandal([self.steady, self.moody], SEED, 10 * plan.pause)
        stack.callback(self.vandal.stop)
        self.samples: list[_Sample] = []
        self.restarts: Counter[str] = Counter()
        self.results: dict[str, dict[str, Any]] = {}
        self.errors: list[str] = []

    def _client(self, name: str, machine: str, service: Standing, number: int) -> subprocess.Popen[bytes]:
        job = Job(
            folder=str(self._folder / machine),
            url=service.url,
            seed=SEED + number,
            modules=[str(TESTS / f"data/corpus/{module}.mlirbc") for module in _MODULES],
            variants=self._plan.variants,
            compiles=number == 0,
            pause_seconds=self._plan.pause,
            ready=str(self._ready(name)),
            stop=str(self._stop),
            result=str(self._result(name)),
            **_LIMITS,
        )
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "drills._soak_client", job.to_json()],
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )

    def run(self) -> None:
        """Samples and restarts until the time is over, then ends all in order."""
        for name in self._clients:
            wait_until(self._ready(name).exists, f"{name} did not begin", seconds=_START_SECONDS)
        plan, began = self._plan, time.monotonic()
        restarting = threading.Thread(target=self._restart_now_and_then)
        restarting.start()
        next_told = 60.0
        while (passed := time.monotonic() - began) < plan.run or len(self.samples) < _FEWEST_SAMPLES:
            self.samples.append(self._sample(passed))
            if passed > next_told:
                next_told += 60.0
                print(f"  {passed:.0f} of {plan.run:.0f} s", file=sys.stderr, flush=True)
            time.sleep(plan.sample)
        self._over.set()
        restarting.join()
        self.vandal.stop()
        self._stop.touch()
        for name, client in self._clients.items():
            self._end(name, client)
        for service in (self.steady, self.moody):
            service.end(orderly=True)
            self.errors += service.errors

    def _restart_now_and_then(self) -> None:
        """Beside the samples, for a start takes long on a loaded machine."""
        while not self._over.wait(self._plan.restart):
            orderly = self.restarts["killed"] == self.restarts["orderly"]
            try:
                self.moody.restart(orderly=orderly)
            except Exception as error:
                self.errors.append(f"the service did not start again: {error}")
                return
            self.restarts["orderly" if orderly else "killed"] += 1

    def _end(self, name: str, client: subprocess.Popen[bytes]) -> None:
        code = client.wait(_END_SECONDS)
        if code or not self._result(name).exists():
            self.errors.append(f"{name} ended with {code}: {self._log(name).read_text()[-1000:]}")
            return
        self.results[name] = json.loads(self._result(name).read_text())

    def _sample(self, passed: float) -> _Sample:
        pids = {name: client.pid for name, client in self._clients.items()}
        pids |= {"service": self.steady.pid, "restarted service": self.moody.pid}
        held = {name: held_by(pid, _KEPT_OPEN) for name, pid in pids.items()}
        return _Sample(passed, {name: each for name, each in held.items() if each}, len(self.temporary()))

    def temporary(self) -> list[str]:
        """Files that somebody is writing now, or has left behind."""
        found = (name for _, _, names in os.walk(self._folder) for name in names)
        return [name for name in found if _TEMPORARY.fullmatch(name)]

    def _ready(self, name: str) -> Path:
        return self._folder / "results" / f"{name}.ready"

    def _result(self, name: str) -> Path:
        return self._folder / "results" / f"{name}.json"

    def _log(self, name: str) -> Path:
        return self._folder / "results" / f"{name}.log"


def run(size: Size) -> Iterator[Figure]:
    """Half an hour, or some seconds of the same."""
    plan = _PLANS[size]
    with clean_folder() as folder, ExitStack() as stack:
        soak = _Soak(folder, plan, stack)
        soak.run()
        left = soak.temporary()
    yield from _happened(soak, size)
    yield from _growth(soak, plan)
    yield Figure.none_of(
        "soak.temporary_files",
        len(left),
        len(soak.samples),
        most=max(sample.temporary for sample in soak.samples),
        first=left[:5],
    )


def _happened(soak: _Soak, size: Size) -> Iterator[Figure]:
    results = soak.results.values()
    done: Counter[str] = sum((Counter(result["done"]) for result in results), Counter())
    counters: dict[str, Counter[str]] = {
        what: sum((Counter(result["counters"][what]) for result in results), Counter())
        for what in ("hits", "failures", "published", "not_published")
    }
    services = soak.steady.counted + soak.moody.counted
    operations = sum(done.values())
    yield Figure.told(
        "soak.operations",
        operations,
        "count",
        seed=SEED,
        seconds=round(soak.samples[-1].seconds),
        done=dict(done),
        badly_treated=dict(soak.vandal.done),
        restarts=dict(soak.restarts),
        **{what: dict(counted) for what, counted in counters.items()},
    )
    wanted = {
        **{f"{tier} hit": counters["hits"][tier] for tier in ("memory", "disk", "remote")},
        **{act: done[act] for act in ("ask", "parse", "compile", "delete", "damage", "fail")},
        **dict.fromkeys(("half_head", "garbage", "cancel_upload", "cancel_download", "damage of a blob"), 0),
        **soak.vandal.done,
        "damage of a blob": soak.vandal.done["damage"],
        "corrupt entry on disk": counters["failures"]["disk.corrupt"],
        "load failure": sum(n for what, n in counters["failures"].items() if what.endswith(".load")),
        "upload": sum(counters["published"].values()),
        "eviction of the service": services["torchtpu_cache_service_evictions_total"],
        "condemned blob": services["torchtpu_cache_service_condemned_total"],
        "restart": sum(soak.restarts.values()),
    }
    missed = [what for what, count in wanted.items() if not count]
    if size is Size.FULL:
        yield Figure.none_of("soak.missed", len(missed), len(wanted), missed=missed)
    else:  # a loaded machine does little in some seconds
        yield Figure.told("soak.missed", len(missed), f"of {len(wanted)}", missed=missed)
    yield Figure.none_of(
        "soak.bad_reads",
        sum(result["bad_read_count"] for result in results),
        operations,
        first=[each for result in results for each in result["bad_reads"]][:5],
    )
    errors = [*soak.errors, *(each for result in results for each in result["errors"])]
    errors += [f"{result['waiting']} entries still wait" for result in results if result["waiting"]]
    yield Figure.none_of(
        "soak.errors",
        len(soak.errors) + sum(result["error_count"] + bool(result["waiting"]) for result in results),
        operations,
        first=errors[:5],
    )


def _growth(soak: _Soak, plan: _Plan) -> Iterator[Figure]:
    """First third after the warm-up and last third, process by process."""
    settled = soak.samples[int(len(soak.samples) * plan.warm_up / plan.run) :]
    third = len(settled) // 3
    first, last = _by_process(settled[:third]), _by_process(settled[-third:])
    names = sorted(first.keys() & last.keys())  # a service that takes long to start may be missing in one

    def medians(name: str, what: str) -> tuple[float, float]:
        before, after = (statistics.median(getattr(held, what) for held in part[name]) for part in (first, last))
        return before, after

    for what, figure in (("rss_bytes", "memory"), ("children_rss_bytes", "helpers_memory")):
        pairs = {name: medians(name, what) for name in names}
        growths = {name: after / before - 1 for name, (before, after) in pairs.items() if before}
        grown = {name: growth for name, growth in growths.items() if pairs[name][1] - pairs[name][0] > _FLOOR_BYTES}
        yield Figure(
            f"soak.{figure}_growth",
            max(growths.values()),
            "ratio",
            f"<= {_MOST_GROWTH:g}, or {_FLOOR_BYTES / _MB:g} MB",
            all(growth <= _MOST_GROWTH for growth in grown.values()),
            {"first_and_last_mb": {name: [round(each / _MB, 1) for each in pair] for name, pair in pairs.items()}},
        )
    for what, bar in (("descriptors", plan.descriptors), ("threads", plan.threads), ("children", 0)):
        pairs = {name: medians(name, what) for name in names}
        growth = max(after - before for before, after in pairs.values())
        yield Figure.at_most(f"soak.{what}_growth", growth, "count", bar, first_and_last=pairs)


def _by_process(samples: list[_Sample]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for sample in samples:
        for name, held in sample.held.items():
            found.setdefault(name, []).append(held)
    return found


def _killed(client: subprocess.Popen[bytes]) -> None:
    """Harmless where it has ended."""
    client.kill()
    client.wait()
