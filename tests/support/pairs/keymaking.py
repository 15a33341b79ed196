"""Keys of written requests by the code under test, and a ledger of what each key has meant so far."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from support.pairs.handmade import make, write
from support.pairs.keytable import REPOSITORY, key_table
from support.pairs.meanings import Maker
from support.pairs.noise import World
from support.pairs.rendering import Writer, Written
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.request import ProgramResolver, Request, Target, resolve

CORPUS: Final = REPOSITORY / "tests" / "data" / "corpus"
_LIBRARY_SEED: Final = 7
_HAND_MADE: Final = 12
_SMALL: Final = ("jax_add.mlirbc", "jax_matmul_gelu.mlirbc", "torch_mlp_inf.mlirbc")


def key_of(written: Written, resolver: ProgramResolver) -> str:
    """The key of a request.

    Raises:
        CacheError: there is none.
    """
    name, parts, independent = written.target
    request = Request(
        program=written.program,
        options=written.options,
        target=Target.of(name, dict(parts), position_independent=independent),
        environment=Environment.snapshot(
            written.environ, written.argv, plugin_options=written.plugin, extras=written.extras
        ),
        executable_format=written.executable_format,
    )
    return resolve(request, resolver).key


def library() -> dict[str, Sequence[bytes]]:
    """Small programs, each with ways to write it; the same in every process."""
    rng = random.Random(_LIBRARY_SEED)
    found: dict[str, Sequence[bytes]] = {name: [(CORPUS / name).read_bytes()] for name in _SMALL}
    for number in range(_HAND_MADE):
        program = make(rng)
        found[f"hand-made {number}"] = [write(program, rng, plainly=True), *(write(program, rng) for _ in range(3))]
    return found


def makers(folder: Path, seed: int) -> tuple[Maker, Writer]:
    """What makes meanings and what writes them; the same seed makes the same meanings in every process."""
    programs = library()
    table = key_table()
    return Maker(table, random.Random(seed), sorted(programs)), Writer(table, World(folder), programs)


@dataclass(slots=True)
class Ledger:
    """No key has had two meanings, and no meaning two keys, in all that was seen."""

    _meanings: dict[str, bytes] = field(default_factory=dict)
    _keys: dict[bytes, str] = field(default_factory=dict)

    @property
    def keys(self) -> int:
        """How many different ones were seen."""
        return len(self._meanings)

    def note(self, key: str, meaning: object) -> str:
        """What is wrong with a key for this meaning, by what was seen before; empty for nothing."""
        digest = hashlib.sha256(repr(meaning).encode("utf-8", "surrogateescape")).digest()
        if self._meanings.setdefault(key, digest) != digest:
            return "a key that another meaning had"
        if self._keys.setdefault(digest, key) != key:
            return "another key than the meaning had before"
        return ""
