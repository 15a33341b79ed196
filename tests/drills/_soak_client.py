"""A job of `soak`: a node with all its parts, asked for programs again and again by two threads, and treated badly.

    python -m drills._soak_client '<JSON of Job>'

Does each thing once, makes the file `ready`, works until the file `stop` appears, then drains, closes, and writes what
it saw to the file `result`, as JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.fakes import FakeCompiler, FakeLoaded, request, target
from torchtpu_cache.api import compile_with
from torchtpu_cache.assembly import Assembly, assemble
from torchtpu_cache.counters import Tier
from torchtpu_cache_core import config
from torchtpu_cache_core.errors import CompileError, LoadError, StoreError
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key
from torchtpu_cache_core.request import Request
from torchtpu_cache_core.stores.layout import Layout

_THREADS: Final = 2
_CHEAP_SECONDS: Final = 0.001
_DRAIN_SECONDS: Final = 60.0
_COMPILES_PER_FLUSH: Final = 10
_REPORTED: Final = 20

_TEXT: Final = """module @soak {{
  func.func public @main(%arg0: tensor<8x8xi32>) -> tensor<8x8xi32> {{
    %0 = stablehlo.constant dense<{number}> : tensor<8x8xi32>
    %1 = stablehlo.add %arg0, %0 : tensor<8x8xi32>
    return %1 : tensor<8x8xi32>
  }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a client is told.

    Args:
        folder: its machine's cache folder, which other clients may share.
        modules: files of real programs.
        variants: how many different requests there are.
        compiles: whether it has XLA compile, too.
        pause_seconds: between two things that a thread does, on average.
    """

    folder: str
    url: str
    seed: int
    modules: list[str]
    variants: int
    compiles: bool
    pause_seconds: float
    disk_bytes: int
    memory_bytes: int
    ready: str
    stop: str
    result: str

    @classmethod
    def from_json(cls, raw: str) -> Job:
        return cls(**json.loads(raw))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Compiler(FakeCompiler):
    """Executables of some size that do not compress, and tell every request from every other."""

    def compile_seconds(self, asked: Request) -> float:
        return _CHEAP_SECONDS if self._number(asked) % 5 == 0 else 1.0 + self._number(asked) % 60

    def executable(self, asked: Request) -> bytes:
        number = self._number(asked)
        return random.Random(number).randbytes(1_000 + number % 60_000)

    def load(self, executable: bytes | memoryview, asked: Request) -> FakeLoaded:
        if asked.program in self.bad_loads:
            self.bad_loads.discard(asked.program)
            raise LoadError("made to fail")
        if bytes(executable) != self.executable(asked):
            raise WrongHit(f"another executable than that of {self._number(asked):x}")
        return FakeLoaded({})

    @staticmethod
    def _number(asked: Request) -> int:
        parts = repr((asked.program, asked.target.parts)).encode()
        return int.from_bytes(hashlib.sha256(parts).digest()[:8], "little")


class WrongHit(Exception):
    """The worst fault there is."""


Act = Callable[[random.Random, Compiler], None]


class Client:
    """What the threads of a job share."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._assembly = _assembled(job)
        self._modules = [Path(path).read_bytes() for path in job.modules]
        self._lock = threading.Lock()  # guards all below
        self._done: Counter[str] = Counter()
        self._errors: list[str] = []
        self._bad_reads: list[str] = []
        self._numbers = job.seed * 1_000_000

    def run(self) -> dict[str, Any]:
        """Works until it is told to stop; gives what happened."""
        chance, compiler = random.Random(self._job.seed), Compiler()
        for act in self._acts():
            self._try(act, chance, compiler)
        Path(self._job.ready).touch()
        threads = [threading.Thread(target=self._work, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        deadline = time.monotonic() + _DRAIN_SECONDS
        # One drain ends early where the service was away just now: the breaker has yet to see that it is back.
        while (waiting := self._assembly.node.drain(_DRAIN_SECONDS)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._assembly.close()
        return {
            "done": dict(self._done),
            "errors": self._errors[:_REPORTED],
            "error_count": len(self._errors),
            "bad_reads": self._bad_reads[:_REPORTED],
            "bad_read_count": len(self._bad_reads),
            "counters": self._assembly.node.counters.snapshot(),
            "waiting": waiting,
        }

    def _work(self, number: int) -> None:
        chance, compiler = random.Random(self._job.seed * 100 + number), Compiler()
        stop, acts = Path(self._job.stop), self._acts()
        while not stop.exists():
            self._try(chance.choices(list(acts), list(acts.values()))[0], chance, compiler)
            time.sleep(chance.uniform(0.0, 2 * self._job.pause_seconds))

    def _acts(self) -> dict[Act, int]:
        """What is done, and how often."""
        compiles: dict[Act, int] = {self._compile: 1} if self._job.compiles else {}
        return {self._ask: 80, self._parse: 6, self._delete: 6, self._damage: 4, self._fail: 4} | compiles

    def _try(self, act: Act, chance: random.Random, compiler: Compiler) -> None:
        try:
            act(chance, compiler)
        except WrongHit as error:
            self._note(self._bad_reads, str(error))
        except Exception:
            self._note(self._errors, traceback.format_exc()[-1500:])
        with self._lock:
            self._done[act.__name__.strip("_")] += 1

    def _note(self, where: list[str], what: str) -> None:
        with self._lock:
            where.append(what)

    def _request(self, chance: random.Random) -> Request:
        """Some are asked for far more often than others."""
        variant = int(self._job.variants * chance.random() ** 3)
        module = self._modules[variant % len(self._modules)]
        return request(module, of=target(platform_version=str(variant)))

    def _ask(self, chance: random.Random, compiler: Compiler) -> None:
        asked = self._request(chance)
        compiler.seconds = compiler.compile_seconds(asked)
        self._answer(asked, compiler)

    def _answer(self, asked: Request, compiler: Compiler) -> None:
        result = self._assembly.node.get_or_compile(
            asked, compiler, load=lambda executable: compiler.load(executable, asked)
        )
        if bytes(result.executable) != compiler.executable(asked):
            raise WrongHit("what was returned is not what was loaded")
        if result.tier is Tier.COMPILED and len(compiler.calls) >= _COMPILES_PER_FLUSH:
            # Nothing real compiles this fast, and so runs ahead of the disk: what waits for it would look like a leak.
            compiler.calls.clear()
            self._assembly.node.flush()

    def _parse(self, chance: random.Random, compiler: Compiler) -> None:
        """A program that nobody has seen: the canonicaliser must parse it."""
        compiler.seconds = _CHEAP_SECONDS
        self._answer(request(self._new_text().encode(), of=target()), compiler)

    def _new_text(self) -> str:
        with self._lock:
            self._numbers += 1
            return _TEXT.format(number=self._numbers)

    def _compile(self, chance: random.Random, compiler: Compiler) -> None:
        """XLA, for this machine's CPU."""
        compile_with(self._assembly, self._new_text().encode(), target="cpu")

    def _fail(self, chance: random.Random, compiler: Compiler) -> None:
        """What XLA cannot make, or what does not load."""
        asked = self._request(chance)
        if chance.random() < 0.5:
            compiler.fails = [True]
        else:
            compiler.bad_loads.add(asked.program)
        try:
            self._answer(asked, compiler)
        except (CompileError, LoadError):
            pass
        finally:
            compiler.fails = []
            compiler.bad_loads.clear()

    def _delete(self, chance: random.Random, compiler: Compiler) -> None:
        disk, remote = self._assembly.disk, self._assembly.remote
        assert disk is not None
        assert remote is not None
        key = self._some_key(chance)
        if key is None:
            return
        if chance.random() < 0.5:
            disk.delete(key)
            return
        try:
            remote.delete(key)
        except StoreError:
            with self._lock:
                self._done["delete refused"] += 1  # the service is restarting

    def _damage(self, chance: random.Random, compiler: Compiler) -> None:
        """What another program, or a dying disk, makes of a file of the disk tier."""
        key = self._some_key(chance)
        if key is None:
            return
        path = Layout(Path(self._job.folder), DEFAULT_NAMESPACE).entry(key)
        try:
            damaged = bytearray(path.read_bytes())
        except FileNotFoundError:
            return  # evicted meanwhile
        damaged[chance.randrange(len(damaged))] ^= 1
        foreign = Path(self._job.stop).with_name(f"damaged {self._job.seed} {threading.get_ident()}")
        foreign.write_bytes(damaged[: chance.choice((len(damaged), len(damaged) // 2))])
        foreign.replace(path)

    def _some_key(self, chance: random.Random) -> Key | None:
        entries = Layout(Path(self._job.folder), DEFAULT_NAMESPACE).entries
        shards = sorted(entries.glob("*")) if entries.is_dir() else []
        names = [path.name for path in chance.choice(shards).glob("ttc1-*")] if shards else []
        return Key(chance.choice(names)) if names else None


def _assembled(job: Job) -> Assembly:
    return assemble(
        config.load(
            {
                "dir": job.folder,
                "remote": job.url,
                "max_disk_bytes": job.disk_bytes,
                "max_memory_bytes": job.memory_bytes,
                "min_free_bytes": 0,
            },
            {},
        ).config
    )


def main() -> None:
    """The process."""
    logging.disable(logging.CRITICAL)  # most of what is logged here is made to happen
    job = Job.from_json(sys.argv[1])
    Path(job.result).write_text(json.dumps(Client(job).run()))


if __name__ == "__main__":
    main()
