"""What a miss adds to a compile before its caller has the result.

`torchtpu_cache.compile` with all tiers on: an empty disk tier, and a real service in a process of its own over
loopback, which answers that it has no entry. What is timed: surroundings, target, options, alias, key, single flight,
three tiers that miss, the checks of what was compiled, and handing it to the thread that packs and stores it.

Stand-in: a compiler that returns a real executable's bytes at once and says that it took what it really took, so that
the whole call is what the cache adds. Each round asks for a key of its own: the stand-in's target differs in one part,
so that the program stays known. Canonicalising a program is apart (`canonicalise`), and so is XLA's serialising: the
bytes are there. The bar is 5 ms, without the one per cent of a compile that it might also be.

Real: modules of the corpus by XLA for the CPU, in the helper process that compiles always run in. Added is what the
call takes beyond the compiler's own call; the bar is 5 ms, or one per cent of the compile where that is more. What the
helper process takes beyond XLA's compile (its serialising, and the way of the bytes) is told, and held to nothing.

Excluded is what follows behind the caller's back; how long it takes until the tier and the spool hold the entry is
told. So is a miss in the midst of it: `back_to_back` asks again at once, while the last one is packed and written.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

from bench._hits import ForTarget, Machine, machine, module
from bench._kept import kept
from support.figures import Figure, Size
from support.rounds import Rounds, Stopwatch, Taken, interleaved, taken_by
from torchtpu_cache.api import compile_with
from torchtpu_cache.compilers.base import Compiled, Compiler, Loaded, Progress
from torchtpu_cache.counters import Tier
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.request import FORMAT_JAXLIB, Request, Target

BAR_SECONDS = 0.005
SHARE_OF_COMPILE = 0.01

SMALL = "jax_matmul_gelu"
LARGE = ("torch_resnet18_fwd", "jax_tfm12_adamw_step")
REAL = ("jax_matmul_gelu", "torch_mlp_bwd", "jax_tfm2_fwd")


def run(size: Size) -> Iterator[Figure]:
    rounds = size.of(short=7, full=25)
    with machine() as here:
        small = here.publish(module(SMALL), "cpu")
        yield from _stood_in(here, "small", bytes(small.executable), small.result.compile_seconds, rounds)
        yield _back_to_back(here, bytes(small.executable), small.result.compile_seconds, rounds * 4)
        if size is Size.FULL:
            for made in kept(LARGE):
                name = f"{len(made.executable) / 1e6:.1f}_mb"
                yield from _stood_in(here, name, bytes(made.executable), made.result.compile_seconds, rounds)
        for name in REAL[:2] if size is Size.SHORT else REAL:
            yield from _real(here, name, rounds)


_NUMBERS = itertools.count()
"""One for each target that is described, so that each is new."""


class StandIn(Compiler):
    """Has its executable at hand, for a target that is new each time it is described."""

    executable_format = FORMAT_JAXLIB

    def __init__(self, executable: bytes, compile_seconds: float) -> None:
        self._compiled = Compiled(
            executable=executable,
            compile_seconds=compile_seconds,
            producer="a stand-in",
            road="client",
            compiler_sha256="c" * 64,
        )

    def for_target(self, _name: str) -> Compiler:
        return self

    def describe(self, name: str, options: bytes, environment: Environment) -> Target:
        parts = {"platform": "stand-in", "platform_version": "1", "compiler": "c" * 64, "number": str(next(_NUMBERS))}
        return Target.of(name, parts)

    def compile(self, request: Request, *, progress: Progress | None = None) -> Compiled:
        return self._compiled

    def load(self, executable: bytes | memoryview, request: Request) -> Loaded:
        raise NotImplementedError


def _missed(here: Machine, compilers: ForTarget) -> Taken:
    """What one miss of a known program takes."""
    assembly = here.with_compilers(compilers)
    program = module(SMALL)
    watch = Stopwatch()
    compiled = compile_with(assembly, program, target="cpu")
    taken = watch.stop()
    if compiled.tier is not Tier.COMPILED:
        raise RuntimeError(f"a miss was to be measured, and the {compiled.tier} tier had it")
    return taken


def _stood_in(here: Machine, name: str, executable: bytes, compile_seconds: float, rounds: int) -> Iterator[Figure]:
    stand_in = StandIn(executable, compile_seconds)
    stored: list[Taken] = []

    def miss() -> Taken:
        taken = _missed(here, stand_in)
        stored.append(taken_by(here.assembly.node.flush))
        here.assembly.node.drain(60)  # no upload shall run beside the next miss
        return taken

    asked = _asked_remote(here)
    measured = interleaved(rounds, {"miss": miss}, warm=0)
    asked = _asked_remote(here) - asked
    more = {
        "executable_bytes": len(executable),
        "compile_seconds": round(compile_seconds, 3),
        "asked_remote": asked,
    }
    yield Figure.at_most(
        f"miss.stand_in.{name}",
        measured.median("miss") * 1000,
        "ms",
        BAR_SECONDS * 1000,
        **measured.told("miss"),
        **more,
    )
    after = Rounds({"stored": stored[-rounds:]})
    yield Figure.told(f"miss.stored_after.{name}", after.median("stored") * 1000, "ms", **after.told("stored"))


def _asked_remote(here: Machine) -> int:
    """How often the remote has said so far that it has no entry."""
    misses: dict[str, int] = here.assembly.node.counters.snapshot()["tier_misses"]
    return misses.get("remote", 0)


def _back_to_back(here: Machine, executable: bytes, compile_seconds: float, rounds: int) -> Figure:
    stand_in = StandIn(executable, compile_seconds)
    asked = _asked_remote(here)
    measured = interleaved(rounds, {"miss": lambda: _missed(here, stand_in)}, warm=0)
    more = {**measured.told("miss"), "asked_remote": _asked_remote(here) - asked}
    here.assembly.node.drain(60)
    return Figure.told("miss.back_to_back.small", measured.median("miss") * 1000, "ms", **more)


class Timed(Compiler):
    """Another compiler, with the seconds of its last call, for a target that is new each time it is described."""

    def __init__(self, inner: Compiler) -> None:
        self._inner = inner
        self.executable_format = inner.executable_format
        self.called_seconds = 0.0
        self.compile_seconds = 0.0

    def for_target(self, _name: str) -> Compiler:
        return self

    def describe(self, name: str, options: bytes, environment: Environment) -> Target:
        target = self._inner.describe(name, options, environment)
        return Target.of(name, {**dict(target.parts), "number": str(next(_NUMBERS))}, position_independent=True)

    def compile(self, request: Request, *, progress: Progress | None = None) -> Compiled:
        started = time.perf_counter()
        compiled = self._inner.compile(request, progress=progress)
        self.called_seconds = time.perf_counter() - started
        self.compile_seconds = compiled.compile_seconds
        return compiled

    def load(self, executable: bytes | memoryview, request: Request) -> Loaded:
        return self._inner.load(executable, request)


def _real(here: Machine, name: str, rounds: int) -> Iterator[Figure]:
    program = module(name)
    timed = Timed(here.assembly.compilers.for_target("cpu"))
    assembly = here.with_compilers(timed)
    compiles: list[Taken] = []
    helper: list[Taken] = []

    def miss() -> Taken:
        taken = taken_by(lambda: compile_with(assembly, program, target="cpu"))
        compiles.append(Taken(timed.compile_seconds))
        helper.append(Taken(timed.called_seconds - timed.compile_seconds))
        here.assembly.node.drain(60)
        return Taken(taken.seconds - timed.called_seconds)

    measured = interleaved(min(rounds, 11), {"added": miss})
    beside = Rounds({"compile": compiles, "helper": helper})
    bar = max(BAR_SECONDS, SHARE_OF_COMPILE * beside.median("compile"))
    told = measured.told("added") | beside.told("compile", "helper")
    yield Figure.at_most(f"miss.real.{name}", measured.median("added") * 1000, "ms", round(bar * 1000, 2), **told)
