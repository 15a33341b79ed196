"""The spool and the aliases, for the corruption drill."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any, Final

from drills._corruption_disk import huge_files
from support.damage import ANYWHERE, OF_ENTRIES, By, accident, forgeries
from support.fakes import FailingStore
from support.rig import private
from support.tally import PeakMemory, Tally
from support.victims import Victim, victims
from torchtpu_cache.counters import Counters
from torchtpu_cache.spool import Spool
from torchtpu_cache_core.canonical.alias import AliasStore, alias_name
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.store import PutOutcome, PutStatus

CORPUS: Final = Path(__file__).parents[1] / "data" / "corpus"
_BATCH: Final = 32
_SMALL_BYTES: Final = 30_000


class _Remote(FailingStore):
    """Takes all that the spool uploads."""

    def __init__(self) -> None:
        super().__init__(AssertionError("the spool only puts"))
        self.taken: list[Entry] = []

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        self.taken.append(entry)
        return PutOutcome(PutStatus.CREATED, entry.digest)


class SpoolAttack:
    """Damages files that wait in the spool: none is uploaded, each is counted, and none waits any longer.

    The spool unpacks nothing, so what only its payload refuses is not among them.
    """

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.folder = private(folder)
        self.tally = tally
        self.rng = random.Random(tally.seed)
        self.known = victims(_BATCH, name="spooled")
        self.remote = _Remote()
        self.counters = Counters()
        self.spool = Spool(folder, self.remote, self.counters, limit_bytes=1 << 40)

    def memory(self) -> None:
        target = self.known[0]
        self._round({target: ("honest", target.raw)}, refused=0)
        self.peak = PeakMemory()
        for kind, head, size in huge_files(target):
            self._round({target: (kind, head)}, refused=1, size=size)

    def run(self, count: int) -> None:
        while self.tally.cases < count:
            planted = {each: self._damaged(each) for each in self.known}
            self._round(planted, refused=len(planted))
            self.tally.say(count)

    def _damaged(self, each: Victim) -> tuple[str, bytes]:
        other = self.rng.choice([one for one in self.known if one is not each])
        if self.rng.random() < 0.7:
            return accident(self.rng, OF_ENTRIES, each.raw)
        forgery = self.rng.choice([one for one in forgeries(self.rng, each, other) if one.by is By.HEAD])
        return f"forged: {forgery.kind}", forgery.data

    def _round(self, planted: dict[Victim, tuple[str, bytes]], *, refused: int, size: int = 0) -> None:
        """Plants files, lets the spool try each once, and looks at what became of them."""
        for each, (_, data) in planted.items():
            path = self.folder / each.key
            path.write_bytes(data)
            if size:
                os.truncate(path, size)
        failed = self.counters.snapshot()["failures"].get("spool.corrupt", 0)
        with self.tally.cases_at_once([kind for kind, _ in planted.values()]):
            self.spool.run_once()
        taken = {entry.key for entry in self.remote.taken}
        self.remote.taken.clear()
        failed = self.counters.snapshot()["failures"].get("spool.corrupt", 0) - failed
        kinds = ", ".join(sorted({kind for each, (kind, _) in planted.items() if each.key in taken}))
        self.tally.check("accepted", kinds, len(taken) == len(planted) - refused)
        self.tally.check("not_counted", kinds, failed == refused)
        self.tally.check("not_set_aside", kinds, not any((self.folder / each.key).exists() for each in planted))
        for _ in range(failed):
            self.tally.refused("corrupt, by the spool")


def attack_spool(folder: Path, tally: Tally, count: int) -> None:
    """What waits in the spool."""
    attack = SpoolAttack(folder / "spool", tally)
    attack.memory()
    attack.run(count)
    tally.rss_growth_bytes = attack.peak.growth_bytes()


class AliasAttack:
    """Damages aliases: each says what it said, or nothing."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.tally = tally
        self.rng = random.Random(tally.seed)
        self.folder = folder
        self.store = AliasStore(folder)
        self.records: dict[str, dict[str, Any]] = {}
        for number in range(_BATCH):
            name = alias_name("drill", str(number))
            self.records[name] = {"facts": {"form": "text", "sha256": f"{number:064x}", "size_bytes": number}}
            self.store.put(name, self.records[name])

    def run(self, count: int) -> None:
        names = list(self.records)
        while self.tally.cases < count:
            name, other = self.rng.sample(names, 2)
            path = self.folder / name[:2] / name
            honest = path.read_bytes()
            theirs = (self.folder / other[:2] / other).read_bytes()
            kind, data = self._damaged(honest, theirs)
            path.write_bytes(data)
            with self.tally.case(kind):
                found = self.store.get(name)
                if found is not None:
                    self.tally.fault("reached_a_loader" if found != self.records[name] else "accepted", kind)
                else:
                    self.tally.refused("no alias")
            path.write_bytes(honest)
            self.tally.say(count)

    def _damaged(self, honest: bytes, theirs: bytes) -> tuple[str, bytes]:
        chosen = self.rng.random()
        if chosen < 0.9:
            return accident(self.rng, ANYWHERE, honest)
        if chosen < 0.95:
            return "another program's alias", theirs
        return "another program's record under this digest", theirs[:-64] + honest[-64:]

    def beyond(self) -> None:
        """Who can write here may say what he likes of a program: nothing but the digest in the file binds it."""
        name, other = self.rng.sample(list(self.records), 2)
        body = json.dumps({"alias": name, "record": self.records[other]}, sort_keys=True).encode()
        (self.folder / name[:2] / name).write_bytes(body + b"\n" + hashlib.sha256(body).hexdigest().encode())
        self.tally.beyond_tried += 1
        self.tally.beyond_served += self.store.get(name) == self.records[other]

    def through_the_canonicaliser(self, folder: Path, rounds: int) -> None:
        """Real programs: whatever stands in their aliases, each gets the identity that it has without any."""
        programs = [path.read_bytes() for path in sorted(CORPUS.rglob("*.mlir*")) if path.stat().st_size < _SMALL_BYTES]
        honest = self._identities(folder, programs) if rounds else []
        for _ in range(rounds):
            kinds = []
            for path in [path for path in folder.rglob("*") if path.is_file()]:
                kind, data = accident(self.rng, ANYWHERE, path.read_bytes())
                path.write_bytes(data)
                kinds.append(kind)
            with self.tally.cases_at_once(kinds):
                found = self._identities(folder, programs)
                self.tally.check("reached_a_loader", "an alias of a real program", found == honest)
            self.tally.refused_as["no alias"] += len(kinds)

    @staticmethod
    def _identities(folder: Path, programs: list[bytes]) -> list[object]:
        resolver = ProgramCanonicaliser(AliasStore(folder))
        found: list[object] = []
        try:
            for program in programs:
                try:
                    found.append(resolver.resolve(program))
                except Bypass as bypass:
                    found.append(bypass.reason)
        finally:
            resolver.close()
        return found


def attack_aliases(folder: Path, tally: Tally, count: int) -> None:
    """Aliases of programs, which say what is asked for at all."""
    attack = AliasAttack(folder / "aliases", tally)
    attack.through_the_canonicaliser(folder / "real", rounds=count // 1000)
    attack.run(count)
    attack.beyond()
