"""A look-up of a program that this machine has seen before, by its raw bytes: no MLIR is parsed.

The module has 185 KB (the 24-layer training step). Ways: `resolve` of a canonicaliser that has not seen the program in
its process, so that the alias comes from the folder of aliases; the same of one that has; and each step alone: the
SHA-256 of the bytes, the alias's name, reading its note, and the rest of the key (options, target, environment, hash).
In page cache, in a warm process; a canonicaliser is made before the clock starts. Rounds are interleaved, medians are
given.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bench._hits import module
from support.clean import clean_folder
from support.figures import Figure, Size
from support.rounds import Taken, interleaved, taken_by
from torchtpu_cache.compilers.registry import compiler_for
from torchtpu_cache_core.canonical.alias import AliasStore
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.request import Request, resolve

BAR_MS = 1.0
NAME = "jax_tfm24_adamw_step"


def run(size: Size) -> Iterator[Figure]:
    with clean_folder() as folder:
        yield from _figures(folder, size.of(short=9, full=51))


def _figures(folder: Path, rounds: int) -> Iterator[Figure]:
    program = module(NAME)
    identities = FileIdentities(folder / "memo")
    aliases = AliasStore(folder / "aliases")

    def canonicaliser() -> ProgramCanonicaliser:
        return ProgramCanonicaliser(aliases, identities=identities)

    knows = canonicaliser()
    knows.resolve(program)
    knows.close()  # the helper process has done its part
    [alias] = [path.name for path in (folder / "aliases").rglob("*") if path.is_file()]
    compiler = compiler_for("cpu", identities=identities, memo_dir=folder / "memo")
    environment = Environment.snapshot(os.environ, sys.argv)
    options = encode_options(use_spmd_partitioning=False)
    request = Request(
        program=program,
        options=options,
        target=compiler.describe("cpu", options, environment),
        environment=environment,
        executable_format=compiler.executable_format,
    )

    def from_disk() -> Taken:
        new = canonicaliser()
        return taken_by(lambda: new.resolve(program))

    measured = interleaved(
        rounds,
        {
            "disk": from_disk,
            "memory": lambda: taken_by(lambda: knows.resolve(program)),
            "sha256": lambda: taken_by(lambda: hashlib.sha256(program).hexdigest()),
            "read_alias": lambda: taken_by(lambda: aliases.get(alias)),
            "whole_key": lambda: taken_by(lambda: resolve(request, knows)),
        },
    )
    if knows.child_pid is not None:
        raise RuntimeError("a known program was parsed again")
    steps = measured.told("sha256", "read_alias")
    for way in ("disk", "memory"):
        shown = {**measured.told(way), **steps, "program_bytes": len(program)}
        yield Figure.at_most(f"alias.{way}", measured.median(way) * 1000, "ms", BAR_MS, **shown)
    yield Figure.told("alias.whole_key", measured.median("whole_key") * 1000, "ms", **measured.told("whole_key"))
    compiler.close()
