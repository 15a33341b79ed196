"""What a service that is dead costs a job's compiles, against the same job without a service.

Ways to be dead: `refused`, nobody listens at its port; `silent`, packets go nowhere: a listener whose queue is full, so
that a connection is neither made nor refused. Each job is a process of its own with a disk tier of its own, and
compiles a row of programs through `torchtpu_cache.compile` with a compiler that takes no time and says that it took a
second; aliases and the target are made up, so that nothing but the cache is timed. `first` is the first call of a
process, imports and assembly included; `later` the median of the hundred calls after it. Added is what the median is
over that of jobs without a remote, in interleaved rounds. A `hung` service, which takes connections and never answers,
is told: it costs the first call the whole time that an answer may take, two seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.clean import clean_folder
from support.figures import Figure, Size
from support.rounds import Rounds, Taken

FIRST_BAR_MS = 100.0
LATER_BAR_MS = 2.0
LATER = 100

JOB = """
import json, sys, time
started, cpu = time.perf_counter(), time.process_time()
import torchtpu_cache
from torchtpu_cache import api
from torchtpu_cache.compilers.base import Compiled
from torchtpu_cache_core.request import Target

PARTS = {"platform": "stand-in", "platform_version": "1", "compiler": "c" * 64}

class StandIn:
    executable_format = "pjrt"
    def for_target(self, name):
        return self
    def describe(self, name, options, environment):
        return Target.of(name, PARTS)
    def compile(self, request, *, progress=None):
        return Compiled(executable=b"x" * 10_000, compile_seconds=1.0, producer="a stand-in", road="client",
                        compiler_sha256="c" * 64)
    def close(self):
        pass

class Programs:
    compilers = StandIn()
    canonicaliser = None
    def resolve(self, program):
        import hashlib
        from torchtpu_cache_core.request import ProgramIdentity
        return ProgramIdentity("raw", hashlib.sha256(program).hexdigest(), len(program))

assembly = api.default_assembly()
assembly._programs = assembly.node._resolver = Programs()
taken = []
for number in range(int(sys.argv[1]) + 1):
    asked = time.perf_counter() if number else started
    compiled = torchtpu_cache.compile(b"program %d" % number, options=b"")
    taken.append(time.perf_counter() - asked)
    if not number:
        cpu = time.process_time() - cpu
    assert compiled.tier == "compiled", compiled.result
counters = assembly.node.counters.snapshot()
print(json.dumps({"first": [taken[0], cpu], "later": sorted(taken[1:])[len(taken) // 2 - 1],
                  "skipped": counters["skipped"], "failures": counters["failures"]}), flush=True)
import os
os._exit(0)  # what waits at the end of a job is not this figure
"""


def run(size: Size) -> Iterator[Figure]:
    rounds = size.of(short=3, full=15)
    with clean_folder() as folder, contextlib.ExitStack() as stack:
        ways: dict[str, str | None] = {"without": None}
        ways["refused"] = _refused()
        ways["silent"] = stack.enter_context(_silent())
        first: dict[str, list[Taken]] = {way: [] for way in ways}
        later: dict[str, list[Taken]] = {way: [] for way in ways}
        for number in range(-1, rounds):
            for way, url in ways.items():
                said = _job(folder / f"{way}{number}", url)
                if number >= 0:
                    first[way].append(Taken(*said["first"]))
                    later[way].append(Taken(said["later"]))
        for way in ("refused", "silent"):
            for name, seconds, bar in (("first", first, FIRST_BAR_MS), ("later", later, LATER_BAR_MS)):
                measured = Rounds(seconds)
                extra = measured.extra(way, "without") * 1000
                yield Figure.at_most(f"dead_service.{way}.{name}", extra, "ms", bar, **measured.told(way, "without"))
        if size is Size.FULL:
            with _hung() as url:
                hung = [_job(folder / f"hung{number}", url) for number in range(3)]
            measured = Rounds(first | {"hung": [Taken(*said["first"]) for said in hung]})
            extra = measured.extra("hung", "without") * 1000
            yield Figure.told("dead_service.hung.first", extra, "ms", **measured.told("hung", "without"))


def _job(folder: Path, url: str | None) -> dict[str, Any]:
    environ = {**os.environ, "TORCHTPU_CACHE_DIR": str(folder)}
    if url is not None:
        environ["TORCHTPU_CACHE_REMOTE"] = url
    answer = subprocess.run(
        [sys.executable, "-c", JOB, str(LATER)], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    if answer.returncode:
        raise RuntimeError(f"a job failed: {answer.stderr[-1000:]}")
    said = json.loads(answer.stdout)
    if url is not None and not said["skipped"].get("remote.breaker_open"):
        raise RuntimeError(f"the service was to be dead, and the job says {said}")
    return {"first": said["first"], "later": said["later"]}


def _refused() -> str:
    """The URL of a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _silent() -> Iterator[str]:
    """The URL of a listener whose queue is full: the kernel drops what asks for a connection."""
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                break
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def _hung() -> Iterator[str]:
    """The URL of a listener that takes connections, into its queue, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
