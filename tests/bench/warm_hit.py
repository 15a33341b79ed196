"""A warm hit against what nobody can do without: read the entry, unpack it, have XLA load it.

Way: `torchtpu_cache.compile` of a real module for the CPU, and `load` on jaxlib's own client, timed together:
surroundings, target, options, alias, key, tiers, every check of the entry, unpacking, the checks before and after the
load. Warm means that this process has done it before: the entry's file is in the page cache, the alias and jaxlib are
loaded, the connection to the service is open. The memory tier is a new one each time. For the hit of the remote the
disk tier is a new, empty folder each time, and the service a real one in a process of its own, over loopback.

Floor: the very same file read in one call, unpacked by zstd in one call, and `deserialize_executable` of a client of
the same process, with device list and options at hand. Nothing is checked.

Rounds are interleaved: floor, disk, remote, floor, ... Medians are compared; quartiles tell the noise. Small programs,
those whose floor is so short that the bar's ratio allows less than its milliseconds, are held to the milliseconds.
Excluded: what follows a hit without its caller's waiting (the write of a remote hit to the disk), and that an
executable is let go.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from bench._hits import Bar, Floor, Machine, machine, module
from support.figures import Figure, Size
from support.rounds import interleaved, taken_by
from torchtpu_cache.compilers import jaxlib_cpu

DISK = Bar(1.15, 0.002)
REMOTE = Bar(1.30, 0.003)

SMALL = ("jax_add", "torch_mlp_fwd")
LARGE = ("torch_llama2_fwd", "torch_resnet18_fwd", "jax_tfm6_adamw_step", "jax_tfm12_adamw_step")


def run(size: Size) -> Iterator[Figure]:
    with machine() as here:
        for name in SMALL:
            yield from _figures(here, name, rounds=size.of(short=5, full=51))
        for name in LARGE if size is Size.FULL else ():
            yield from _figures(here, name, rounds=15)


def _figures(here: Machine, name: str, rounds: int) -> Iterator[Figure]:
    program = module(name)
    started = time.monotonic()
    compiled = here.publish(program, "cpu")
    print(f"  {name}: {compiled.tier} in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    floor = Floor(here, compiled)
    xla_client = jaxlib_cpu.import_jaxlib()
    client = jaxlib_cpu.start_client(xla_client, 1)
    devices = jaxlib_cpu.device_list(xla_client, client, [0])
    options = jaxlib_cpu.parse_options(xla_client, compiled.request.options)
    measured = interleaved(
        rounds,
        {
            "floor": lambda: taken_by(lambda: client.deserialize_executable(floor.executable(), devices, options)),
            "disk": lambda: here.disk_hit(program, "cpu", lambda hit: hit.load()),
            "remote": lambda: here.remote_hit(program, "cpu", lambda hit: hit.load()),
        },
    )
    more = {"entry_bytes": floor.entry_bytes, "executable_bytes": floor.executable_bytes}
    yield DISK.figure(f"warm_hit.disk.{name}", measured, "disk", "floor", **more)
    yield REMOTE.figure(f"warm_hit.remote.{name}", measured, "remote", "floor", **more)
