"""The other process of the pairs drill: another hash seed, user, home, folder and locale.

    python -m drills._pairs_worker FOLDER SEED COUNT JAXLIB

Prints a JSON list of keys: of COUNT meanings from SEED, each written in every way that must not matter, then of JAXLIB
options that jaxlib itself wrote.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from support.pairs.keymaking import key_of, makers
from support.pairs.noise import EVERY_NOISE, Noise
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.request import ProgramResolver


def keys(folder: Path, seed: int, count: int, noise: Noise, noise_seed: int, resolver: ProgramResolver) -> list[str]:
    """Of the meanings of a seed, in their order."""
    maker, writer = makers(folder, seed)
    rng = random.Random(noise_seed)
    return [key_of(writer.write(maker.meaning(), rng, noise), resolver) for _ in range(count)]


def jaxlib_keys(folder: Path, seed: int, count: int, resolver: ProgramResolver) -> list[str]:
    """Of a plain request with options that jaxlib wrote, its maps in whatever order it likes."""
    maker, writer = makers(folder, seed)
    plain = writer.write(maker.meaning(), random.Random(0))
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        found.append(key_of(type(plain)(**{**_fields(plain), "options": _jaxlib_options(rng)}), resolver))
    return found


def _fields(written: Any) -> dict[str, Any]:
    return {name: getattr(written, name) for name in written.__slots__}


def _jaxlib_options(rng: random.Random) -> bytes:
    from jaxlib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = rng.randint(1, 4), rng.randint(1, 4)
    options.profile_version = rng.randrange(9)
    overrides = [(f"xla_tpu_{name}", str(rng.randrange(99))) for name in "abcdefgh"]
    options.env_option_overrides = overrides
    build = options.executable_build_options
    build.use_spmd_partitioning = rng.random() < 0.5
    build.fdo_profile = rng.randbytes(8)
    build.debug_options.xla_cpu_enable_fast_math = rng.random() < 0.5
    return bytes(options.SerializeAsString())


def main(folder: str, seed: str, count: str, jaxlib: str) -> None:
    """Prints the keys."""
    resolver = ProgramCanonicaliser(None)
    try:
        written = random.SystemRandom().randrange(1 << 32)
        found = keys(Path(folder), int(seed), int(count), EVERY_NOISE, written, resolver)
        found += jaxlib_keys(Path(folder), int(seed), int(jaxlib), resolver)
    finally:
        resolver.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
