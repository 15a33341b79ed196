"""A hit of a large TPU executable, as bytes in hand, against reading and unpacking the same bytes.

The programs are the 12 and 24 layer training steps of the corpus, compiled for v5e:2x2 by the real libtpu: 47 MB and 92
MB of executable in entries of 3 MB and 7 MB. Compiling them takes minutes, once: they are kept in `.bench/cache` beside
the sources. There is no TPU here to load them; a CPU loader would be no measure.

Way: `torchtpu_cache.compile` of the module, until `executable` is there, from the disk tier, or from a real service in
a process of its own over loopback into an empty disk tier. Warm as in `warm_hit`; each time a new memory tier. Floor:
the very same file read in one call and unpacked by zstd in one call, unchecked. Rounds are interleaved; medians are
compared. Excluded: what follows a hit without its caller's waiting, and that an executable is let go.

The short form takes a small program for the CPU, which costs no minutes, and is held to milliseconds instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench._hits import Bar, Floor, Machine, machine, module
from bench._kept import KEPT, TARGET, kept
from support.figures import Figure, Size
from support.rounds import interleaved, taken_by

DISK = Bar(1.30, 0.002)
REMOTE = Bar(1.50, 0.003)

PROGRAMS = ("jax_tfm12_adamw_step", "jax_tfm24_adamw_step")


def run(size: Size) -> Iterator[Figure]:
    if size is Size.SHORT:
        with machine() as here:
            yield from _figures(here, "jax_tfm2_fwd", "cpu", rounds=5)
        return
    kept(PROGRAMS)
    with machine(KEPT) as here:
        for name in PROGRAMS:
            yield from _figures(here, name, TARGET, rounds=15)


def _figures(here: Machine, name: str, target: str, rounds: int) -> Iterator[Figure]:
    program = module(name)
    floor = Floor(here, here.publish(program, target))
    measured = interleaved(
        rounds,
        {
            "floor": lambda: taken_by(floor.executable),
            "disk": lambda: here.disk_hit(program, target, lambda hit: hit.executable),
            "remote": lambda: here.remote_hit(program, target, lambda hit: hit.executable),
        },
    )
    more = {"entry_bytes": floor.entry_bytes, "executable_bytes": floor.executable_bytes}
    yield DISK.figure(f"large_hit.disk.{name}", measured, "disk", "floor", **more)
    yield REMOTE.figure(f"large_hit.remote.{name}", measured, "remote", "floor", **more)
