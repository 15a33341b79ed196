"""Pairs of requests: those that differ in one component that matters have different keys, all others have one key.

**Generated pairs.** A meaning is made at random: program, options on the wire, target, flags by every road, variables,
plugin options and extras, with files that flags name. It is written twice, the second time in a way that must not
matter, and the keys must be equal; or it is changed in one component that matters, and the keys must differ. Each
option field that docs/key.md keeps is changed in its turn, all of DebugOptions among them, on protobuf's wire format.
Changes include what only looks alike: a value spelt like a file's content, a file that holds what a folder's listing
says, a flag named as a group of them is. `support/pairs/meanings.py`, `changes.py` and `rendering.py` have the kinds.

**Programs.** Hand-made ones, written plainly and with other names, blanks, comments, places and module names, and
changed in one operation, operand, attribute or in what they return; real modules of the corpus, changed through MLIR
and written as text and bytecode with other places and symbols (`support/pairs/mlir_mutations.py`); and every two
modules of the corpus.

**Other processes.** The same meanings, made and written in fresh interpreters with other hash seeds, users, homes, time
zones, locales and working folders, and options that jaxlib itself serialised there, have the keys that they have here.
Processors as the kernel lists them, and compilers' files, are told apart by content alone.

**Oracle.** What matters is what the generator did, by the tables of docs/key.md and the descriptors inside jaxlib; no
code that makes keys is asked. In all of a run, no key may have two meanings and no meaning two keys.

**Excluded.** Changes whose meaning nobody can name: operations in another order, swapped operands of ones that commute,
an option given explicitly with its default (a miss at worst), the order within messages that are kept as they stand.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from drills._pairs_worker import jaxlib_keys, keys
from support.clean import clean_folder
from support.figures import Figure, Size, seeded
from support.pairs.changes import Changes
from support.pairs.handmade import change, make, write
from support.pairs.keymaking import CORPUS, Ledger, key_of, makers
from support.pairs.meanings import Meaning
from support.pairs.noise import EVERY_NOISE, Noise
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.host import HostCpu, host_cpu
from torchtpu_cache_core.identity import FileIdentities

_SHORT_SEED: Final = 20261130
_SAID_EVERY_SECONDS: Final = 10.0
_SHOWN: Final = 5
_EVERY_WAY: Final = [*Noise, EVERY_NOISE]
_MODULES: Final = ("jax_add", "jax_mlp4_sgd_step", "torch_mlp_fwd")
_LARGE_BYTES: Final = 100_000
_MAX_TRIES: Final = 500
_OTHER_PROCESSES: Final = (
    {"PYTHONHASHSEED": "0", "USER": "ada", "HOME": "/nowhere/ada", "TZ": "Asia/Tokyo", "LANG": "C"},
    {"PYTHONHASHSEED": "1", "USER": "bob", "HOME": "/", "LANG": "tr_TR.UTF-8", "LC_ALL": "C.UTF-8"},
    {"PYTHONHASHSEED": "random", "LOGNAME": "carol", "XLA_FLAGS": "--xla_cpu_enable_fast_math", "TPU_NAME": "pod-7"},
    {"PYTHONHASHSEED": "4294967295", "PYTHONOPTIMIZE": "1", "PYTHONUTF8": "1", "HOSTNAME": "pod-8"},
)


@dataclass
class Counts:
    """What was compared so far; `found` has what was wrong."""

    size: Size
    seed: int
    equal: Counter[str] = field(default_factory=Counter)
    different: Counter[str] = field(default_factory=Counter)
    wrongly_equal: list[str] = field(default_factory=list)
    wrongly_different: list[str] = field(default_factory=list)
    said: float = 0.0

    def pair(self, kind: str, one: object, other: object, *, same: bool) -> None:
        """Compares two keys or identities."""
        (self.equal if same else self.different)[kind] += 1
        if (one == other) is not same:
            (self.wrongly_different if same else self.wrongly_equal).append(
                f"{kind} (seed {self.seed}, pair {self.tried})"
            )
        if self.size is Size.FULL and time.monotonic() - self.said > _SAID_EVERY_SECONDS:
            self.said = time.monotonic()
            print(f"  pairs: {self.tried:,}, now {kind}", file=sys.stderr, flush=True)

    @property
    def tried(self) -> int:
        return sum(self.equal.values()) + sum(self.different.values())


def run(size: Size) -> Iterator[Figure]:
    """The figures of the drill."""
    # The short form is the same every time; the full one is another each time, and says its seed.
    seed = _SHORT_SEED if size is Size.SHORT else random.SystemRandom().randrange(1 << 32)
    counts, ledger = Counts(size, seed), Ledger()
    resolver = ProgramCanonicaliser(None)
    try:
        with seeded(seed), clean_folder() as folder:
            collisions = _generated(folder / "world", size.of(2400, 88_000), counts, ledger, resolver)
            _hand_made(size.of(60, 6000), counts, resolver)
            _mutated(size.of(6, 110), counts, resolver)
            _corpus(counts, resolver)
            _other_processes(folder / "others", size.of(60, 2000), counts, resolver)
            _processors(folder / "cpus", size.of(40, 600), counts)
            _compilers(folder / "compilers", size.of(20, 200), counts)
    finally:
        resolver.close()
    yield from _figures(counts, ledger, collisions)


def _figures(counts: Counts, ledger: Ledger, collisions: list[str]) -> Iterator[Figure]:
    planned = counts.size.of(2500, 100_000)
    yield Figure.at_least(
        "pairs.tried",
        counts.tried,
        "count",
        planned,
        seed=counts.seed,
        equal=dict(sorted(counts.equal.items())),
        different=_gathered(counts.different),
    )
    equal, different = sum(counts.equal.values()), sum(counts.different.values())
    for name, found, of in (
        ("pairs.wrongly_equal", counts.wrongly_equal, different),
        ("pairs.wrongly_different", counts.wrongly_different, equal),
        ("pairs.collisions", collisions, ledger.keys),
    ):
        yield Figure.none_of(name, len(found), of, **({"shown": found[:_SHOWN]} if found else {}))


def _gathered(different: Counter[str]) -> dict[str, object]:
    """Counts by kind, the hundreds of options together."""
    options = {kind: count for kind, count in different.items() if " option " in kind and kind.split()[1] == "option"}
    gathered: dict[str, object] = {kind: different[kind] for kind in sorted(different.keys() - options.keys())}
    for level in sorted({kind.split()[0] for kind in options}):
        pairs = [count for kind, count in options.items() if kind.split()[0] == level]
        gathered[f"{level} options"] = {"fields": len(pairs), "pairs": sum(pairs), "fewest of a field": min(pairs)}
    return gathered


# ---- generated -------------------------------------------------------------------------------------------------------


def _generated(folder: Path, count: int, counts: Counts, ledger: Ledger, resolver: ProgramCanonicaliser) -> list[str]:
    """Meanings written otherwise, and changed; gives the collisions with what was seen before."""
    maker, writer = makers(folder, counts.seed)
    changes, rng = Changes(maker), random.Random(counts.seed)
    collisions: list[str] = []

    def key(meaning: Meaning, noise: Noise = Noise.NONE) -> str:
        found = key_of(writer.write(meaning, rng, noise), resolver)
        if wrong := ledger.note(found, meaning):
            collisions.append(f"{wrong} (seed {counts.seed}, pair {counts.tried})")
        return found

    for turn in range(count // 2):
        kind, (one, other) = changes.next()
        counts.pair(kind, key(one), key(other), same=False)
        noise = _EVERY_WAY[turn % len(_EVERY_WAY)]
        for _ in range(_MAX_TRIES):  # not every meaning can be written in every other way
            meaning = maker.meaning()
            plain, otherwise = writer.write(meaning, rng), writer.write(meaning, rng, noise)
            if not plain.looks_like(otherwise):
                kind = "all at once" if noise == EVERY_NOISE else (noise.name or "").lower().replace("_", " ")
                counts.pair(kind, key(meaning), key_of(otherwise, resolver), same=True)
                break
    return collisions


# ---- programs --------------------------------------------------------------------------------------------------------


def _hand_made(count: int, counts: Counts, resolver: ProgramCanonicaliser) -> None:
    rng = random.Random(counts.seed)
    for _ in range(count // 2):
        program = make(rng)
        kind, other = change(program, rng)
        plain = resolver.resolve(write(program, rng, plainly=True))
        counts.pair("hand-made program, written otherwise", plain, resolver.resolve(write(program, rng)), same=True)
        changed = resolver.resolve(write(other, rng))
        counts.pair(f"hand-made program, {kind}", plain, changed, same=program == other)


def _mutated(count: int, counts: Counts, resolver: ProgramCanonicaliser) -> None:
    """Modules of the corpus: small ones often, large ones now and then."""
    paths = [CORPUS / f"{name}.mlirbc" for name in _MODULES]
    if counts.size is Size.FULL:
        paths = sorted(path for path in CORPUS.glob("*.mlirbc") if path.stat().st_size < _LARGE_BYTES)
        large = sorted(path for path in CORPUS.glob("*.mlirbc") if path.stat().st_size >= _LARGE_BYTES)
        _mutate(large, 6, counts, resolver)
    _mutate(paths, count, counts, resolver)


def _mutate(paths: list[Path], count: int, counts: Counts, resolver: ProgramCanonicaliser) -> None:
    command = [sys.executable, "-m", "support.pairs.mlir_mutations", str(counts.seed), str(count), *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": _paths()}) as process:
        assert process.stdout is not None
        original: object = None
        while line := process.stdout.readline():
            told = json.loads(line)
            identity = resolver.resolve(process.stdout.read(told["length"]))
            if told["kind"] == "original":
                original = identity
            else:
                counts.pair(f"real module, {told['kind']}", original, identity, same=told["same"])
    if process.returncode:
        raise RuntimeError(f"the mutations ended with {process.returncode}")


def _corpus(counts: Counts, resolver: ProgramCanonicaliser) -> None:
    """Every two modules; one of them is there as text and as bytecode."""
    found: dict[str, object] = {}
    for path in sorted(CORPUS.glob("*.mlir*")):
        if counts.size is Size.FULL or path.stat().st_size < _LARGE_BYTES:
            try:
                found[path.name] = resolver.resolve(path.read_bytes())
            except Bypass as bypass:
                raise RuntimeError(f"{path.name} has no key") from bypass
    names = sorted(found)
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            same = Path(one).stem == Path(other).stem
            counts.pair("two modules of the corpus", found[one], found[other], same=same)


# ---- processes and machines ------------------------------------------------------------------------------------------


def _other_processes(folder: Path, count: int, counts: Counts, resolver: ProgramCanonicaliser) -> None:
    jaxlib = counts.size.of(5, 50)
    for number, environ in enumerate(_OTHER_PROCESSES if counts.size is Size.FULL else _OTHER_PROCESSES[1:3]):
        seed, world = counts.seed + number, folder / str(number)
        here = keys(world, seed, count, Noise.NONE, 0, resolver) + jaxlib_keys(world, seed, jaxlib, resolver)
        elsewhere = folder / "cwd"
        elsewhere.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "drills._pairs_worker", str(world), str(seed), str(count), str(jaxlib)]
        environ = {"PATH": os.environ["PATH"], "PYTHONPATH": _paths(), **environ}
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=3600, env=environ, cwd=elsewhere if number % 2 else "/"
        )
        if done.returncode:
            raise RuntimeError(f"another process ended with {done.returncode}")
        for place, (one, other) in enumerate(zip(here, json.loads(done.stdout.splitlines()[-1]), strict=True)):
            kind = "another process" if place < count else "another process, options by jaxlib"
            counts.pair(kind, one, other, same=True)


def _paths() -> str:
    return os.pathsep.join(path for path in sys.path if path)


@dataclass(frozen=True, slots=True)
class _Processor:
    """What of a processor decides which instructions may be used."""

    model: str = "143"
    stepping: str = "8"
    name: str = "Made Up(R) 8481C"
    features: tuple[str, ...] = ("avx2", "avx512f", "bmi2", "fma", "fpu")


def _processors(folder: Path, count: int, counts: Counts) -> None:
    """/proc/cpuinfo of processors that differ, and of one at different moments."""
    folder.mkdir()
    rng = random.Random(counts.seed)
    changes = {
        "a feature less": lambda one: replace(one, features=one.features[:2] + one.features[3:]),
        "a feature more": lambda one: replace(one, features=(*one.features, "amx_tile")),
        "another model": lambda one: replace(one, model="207"),
        "another stepping": lambda one: replace(one, stepping="6"),
        "another name": lambda one: replace(one, name="Made Up(R) 8481D"),
    }
    for number in range(count // 2):
        one = _Processor(features=tuple(rng.sample(_FEATURES, rng.randint(4, 20))))
        kind = rng.choice(sorted(changes))
        plain = _listed(folder / f"{number} plain", one, rng)
        counts.pair("processor, listed otherwise", plain, _listed(folder / f"{number} otherwise", one, rng), same=True)
        counts.pair(
            f"processor, {kind}", plain, _listed(folder / f"{number} other", changes[kind](one), rng), same=False
        )


_FEATURES: Final = [f"feature{number}" for number in range(40)]


def _listed(path: Path, processor: _Processor, rng: random.Random) -> HostCpu:
    """Cores in any number, features in any order, and the clock of the moment."""
    blocks = []
    for core in range(rng.randint(1, 4)):
        features = rng.sample(processor.features, len(processor.features))
        lines = [
            f"processor\t: {core}",
            "vendor_id\t: MadeUp",
            "cpu family\t: 6",
            f"model\t\t: {processor.model}",
            f"model name\t: {processor.name}",
            f"stepping\t: {processor.stepping}",
            f"cpu MHz\t\t: {rng.uniform(800, 4000):.3f}",
            f"flags\t\t: {' '.join(features + features[: rng.randint(0, 2)])}",
            f"bogomips\t: {rng.uniform(4000, 6000):.2f}",
        ]
        blocks.append("\n".join(lines) + "\n")
    path.write_text("\n".join(blocks))
    return host_cpu(path)


def _compilers(folder: Path, count: int, counts: Counts) -> None:
    """A compiler is its bytes: copied elsewhere it is the same, with one bit changed another."""
    folder.mkdir()
    rng, identities = random.Random(counts.seed), FileIdentities(None)
    for number in range(count // 2):
        raw = rng.randbytes(rng.randint(1, 200_000))
        at = rng.randrange(len(raw))
        changed = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
        found = []
        for name, content in (("one", raw), ("copy", raw), ("changed", changed)):
            path = folder / f"{name} {number}.so"
            path.write_bytes(content)
            found.append(identities.sha256(path))
        counts.pair("compiler's file, copied", found[0], found[1], same=True)
        counts.pair("compiler's file, a bit changed", found[0], found[2], same=False)
