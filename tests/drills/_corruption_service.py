"""The service's data folder, for the corruption drill: blobs, manifests and the SQLite index, read by a real client."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import sqlite3
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from drills._corruption_disk import LARGEST_BYTES, huge_files
from support.damage import ANYWHERE, OF_ENTRIES, By, accident, bombed, forgeries
from support.fakes import RawResolver
from support.replies import manifest_of
from support.served import Served
from support.service import running_service
from support.tally import PeakMemory, Tally
from support.victims import KnowingCompiler, Recorder, Victim, victim, victims
from torchtpu_cache.counters import Tier
from torchtpu_cache.node import Node
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Namespace

_KNOWN: Final = 24
_COLD_BATCH: Final = 120
_REPLACED_EVERY: Final = 3


class Client:
    """Asks a service as a job without other tiers does, and judges what comes of it."""

    def __init__(self, url: str, tally: Tally, known: list[Victim]) -> None:
        self.tally = tally
        self.remote = RemoteStore(url, DEFAULT_NAMESPACE, connect_seconds=5.0, answer_seconds=10.0)
        self.recorder = Recorder()
        self.compiler = KnowingCompiler(known)

    def ask(self, kind: str, target: Victim, *, refused: bool) -> str:
        """`hit`, `failure` or `miss`, as the node counts it; a fault where it was none of what it may be.

        Args:
            refused: even the true executable must not be served.
        """
        # One for each: what a node learns of a bad remote is another drill's.
        node = Node(resolver=RawResolver(), remote=self.remote)
        result = node.answer(target.resolved, self.compiler, load=self.recorder)
        totals = node.counters.snapshot()
        if any(each != target.executable for each in [*self.recorder.take(), bytes(result.executable)]):
            self.tally.fault("reached_a_loader", kind)
        if result.tier is Tier.REMOTE:
            if refused:
                self.tally.fault("accepted", kind)
            self.tally.served_true += 1
            return "hit"
        if totals["tier_misses"]:
            return "miss"
        self.tally.check("not_counted", kind, sum(totals["failures"].values()) == 1)
        self.tally.refused(",".join(totals["failures"]))
        return "failure"

    def is_sound(self, target: Victim) -> bool:
        """Whether the service has the right entry of a key."""
        found = self.remote.get(target.key)
        return found is not None and bytes(found.entry.executable()) == target.executable

    def close(self) -> None:
        self.remote.close()


@dataclass
class Planted:
    """A damaged key.

    Args:
        manifest, blob: what is written; None for what is not there.
        digest: what the blob is named after.
        refused: even the true executable must not be served.
        by_client: the service cannot tell, for it unpacks nothing; every reader can.
    """

    kind: str
    manifest: bytes | None
    blob: bytes | None
    digest: Digest
    refused: bool = True
    generation: int = 1
    by_client: bool = False


class DataFolder:
    """The files of a service that is not running, or that is and does not see us."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def blob(self, digest: Digest) -> Path:
        return self.root / "blobs" / "sha256" / digest[:2] / digest

    def manifest(self, target: Victim, generation: int = 1) -> Path:
        return self.root / "entries" / DEFAULT_NAMESPACE / target.key / str(generation)

    def plant(self, target: Victim, planted: Planted) -> None:
        for path, data in (
            (self.blob(planted.digest), planted.blob),
            (self.manifest(target, planted.generation), planted.manifest),
        ):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if data is not None:
                path.write_bytes(data)


# ---- a service that runs ---------------------------------------------------------------------------------------------


class LiveAttack:
    """Damages blobs below a running service, which has served them before."""

    def __init__(self, service: Served, tally: Tally) -> None:
        self.tally = tally
        self.rng = random.Random(tally.seed)
        self.known = victims(_KNOWN, large=1, name="served")
        self.largest = victim("the largest", LARGEST_BYTES, packs=False)
        self.files = DataFolder(service.data_dir)
        self.service = service
        self.client = Client(service.url, tally, [*self.known, self.largest])
        for each in [*self.known, self.largest]:
            self.client.remote.put(each.entry)
            assert self.client.is_sound(each)

    def memory(self) -> None:
        target, path = self.known[0], self.files.blob(self.known[0].entry.digest)
        self.peaks = PeakMemory(self.service.process.pid), PeakMemory()
        for kind, head, size in huge_files(target):
            self._damage(path, head, in_place=False)
            os.truncate(path, size)
            self._ask(kind, target)
        for forgery in bombed(target):
            self._damage(path, forgery.data, in_place=False)
            self._ask(forgery.kind, target)

    def run(self, count: int) -> None:
        while self.tally.cases < count:
            target, other = self.rng.sample(self.known, 2)
            path = self.files.blob(target.entry.digest)
            kind, place = self._kind(target, other)
            place(path)
            self._ask(kind, target)
            self.tally.say(count)

    def _kind(self, target: Victim, other: Victim) -> tuple[str, Callable[[Path], None]]:
        chosen, in_place = self.rng.random(), self.rng.random() < 0.5
        if chosen < 0.03:
            return self.rng.choice(
                [
                    ("no blob", Path.unlink),
                    ("a folder for a blob", _foldered),
                    ("a pipe for a blob", _piped),
                    ("a link for a blob", self._linked),
                ]
            )
        if chosen < 0.65:
            kind, data = accident(self.rng, OF_ENTRIES, target.raw)
        else:
            forgery = self.rng.choice(list(forgeries(self.rng, target, other)))
            kind, data = f"forged: {forgery.kind}", forgery.data
        return kind, lambda path: self._damage(path, data, in_place=in_place)

    def _linked(self, path: Path) -> None:
        """To the right bytes, elsewhere: whoever can put a link here decides later what they are."""
        elsewhere = self.service.data_dir.with_name("elsewhere")
        elsewhere.write_bytes(path.read_bytes())
        path.unlink()
        path.symlink_to(elsewhere)

    @staticmethod
    def _damage(path: Path, data: bytes, *, in_place: bool) -> None:
        written = path if in_place and path.is_file() else path.with_name("damaged")
        written.write_bytes(data)
        if written != path:
            written.replace(path)

    def _ask(self, kind: str, target: Victim) -> None:
        tally = self.tally
        with tally.case(kind):
            answer = self.client.ask(kind, target, refused=True)
            tally.check("counted_as_miss", kind, answer != "miss")
        if tally.cases % _REPLACED_EVERY == 0:
            with tally.unharmed(kind):
                tally.check("not_set_aside", kind, self.client.remote.get(target.key) is None)
        with tally.unharmed(kind):
            self.client.remote.put(Entry.parse(target.raw))
        if tally.cases % _REPLACED_EVERY == 0:
            with tally.unharmed(kind):
                tally.check("not_replaced", kind, self.client.is_sound(target))


def _foldered(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def attack_live(folder: Path, tally: Tally, count: int) -> None:
    """Blobs of a service that runs."""
    with running_service(folder / "live") as service:
        attack = LiveAttack(service, tally)
        attack.memory()
        attack.run(count)
        tally.rss_growth_bytes = max(peak.growth_bytes() for peak in attack.peaks)
        attack.client.close()


# ---- a service that starts -------------------------------------------------------------------------------------------


def planted_key(rng: random.Random, target: Victim, other: Victim) -> Planted:
    """One way for manifest and blob of `target` to be wrong, on a disk that a service comes to."""
    manifest, digest = manifest_of(target.entry), target.entry.digest
    honest = Planted("", manifest.to_bytes(), target.raw, digest)
    chosen = rng.random()
    if chosen < 0.3:
        kind, data = accident(rng, ANYWHERE, manifest.to_bytes())
        # Its writer and its time are words that nothing holds against anything yet.
        return replace(honest, kind=f"manifest: {kind}", manifest=data, refused=False)
    if chosen < 0.5:
        kind, data = accident(rng, OF_ENTRIES, target.raw)
        return replace(honest, kind=f"blob: {kind}", blob=data)
    forgery = rng.choice(list(forgeries(rng, target, other)))
    forged = _named(manifest, forgery.data)
    if chosen < 0.65:
        return replace(honest, kind=f"blob forged: {forgery.kind}", blob=forgery.data)
    if chosen < 0.8 and forgery.by is not By.DIGEST:
        return replace(
            honest,
            kind=f"both forged: {forgery.kind}",
            blob=forgery.data,
            manifest=forged.to_bytes(),
            digest=forged.digest,
            by_client=forgery.by is By.PAYLOAD,
        )
    kinds: dict[str, dict[str, Any]] = {
        "another key's manifest": {"manifest": manifest_of(other.entry).to_bytes()},
        "another namespace's manifest": {"manifest": manifest_of(target.entry, Namespace("other")).to_bytes()},
        "a manifest of another generation": {"generation": 2},
        "a manifest that names another key's blob": {
            "manifest": _named(manifest, other.raw).to_bytes(),
            "digest": other.entry.digest,
            "blob": other.raw,
        },
        "a manifest of another length": {"manifest": replace(manifest, size_bytes=manifest.size_bytes + 1).to_bytes()},
        "no blob": {"blob": None},
        "an empty manifest": {"manifest": b""},
        "another version's manifest": {"manifest": manifest.to_bytes().replace(b'"version":1', b'"version":2')},
    }
    kind = rng.choice(list(kinds))
    return replace(honest, kind=kind, **kinds[kind])


def _named(manifest: Manifest, blob: bytes) -> Manifest:
    return replace(manifest, digest=Digest(hashlib.sha256(blob).hexdigest()), size_bytes=len(blob))


def attack_cold(folder: Path, tally: Tally, count: int) -> None:
    """Manifests and blobs of a service that starts without an index: it finds what is wrong, or a reader does."""
    rng, batch = random.Random(tally.seed), 0
    while tally.cases < count:
        batch += 1
        *targets, other = victims(min(_COLD_BATCH, count - tally.cases) + 1, name=f"cold {batch}")
        planted = {each: planted_key(rng, each, other) for each in targets}
        files = DataFolder(folder / f"cold {batch}")
        for each, one in planted.items():
            files.plant(each, one)
        with running_service(files.root) as service, contextlib.closing(Client(service.url, tally, targets)) as client:
            _ask_all(service, client, planted)
        shutil.rmtree(files.root)
        tally.say(count)


def _ask_all(service: Served, client: Client, planted: dict[Victim, Planted]) -> None:
    """What the service finds at its start it closes before anybody asks, so that the key reads as free: it must have
    counted each of those."""
    tally, answers = client.tally, dict.fromkeys(planted, "crash")
    for each, one in planted.items():
        with tally.case(one.kind):
            answers[each] = client.ask(one.kind, each, refused=one.refused)
    by_service = [each for each, one in planted.items() if answers[each] != "hit" and not one.by_client]
    tally.refused_as["found at the start"] += sum(answers[each] == "miss" for each in by_service)
    condemned = _condemned(service.url)
    kind = f"{len(by_service)} bad keys, {condemned} counted by the service"
    tally.check("counted_as_miss", kind, condemned == len(by_service))
    for each in [each for each, one in planted.items() if not one.by_client][::_REPLACED_EVERY]:
        with tally.unharmed(planted[each].kind):
            client.remote.put(each.entry)
            tally.check("not_replaced", planted[each].kind, client.is_sound(each))


def _condemned(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line.split()[1] for line in lines if "_condemned_total " in line and line[0] != "#")))


# ---- the index -------------------------------------------------------------------------------------------------------


def attack_index(folder: Path, tally: Tally, count: int) -> None:
    """The SQLite file below a service that starts and trusts it, for its last end was clean."""
    rng, known = random.Random(tally.seed), victims(8, name="indexed")
    honest, root = folder / "honest", folder / "index"
    with running_service(honest) as service, contextlib.closing(Client(service.url, tally, known)) as client:
        for each in known:
            client.remote.put(each.entry)
    while tally.cases < count:
        shutil.copytree(honest, root)
        kind = _damage_index(rng, root, known)
        with tally.case(kind, timed=False):  # most of it is the start of a process
            with running_service(root) as service, contextlib.closing(Client(service.url, tally, known)) as client:
                answers = [client.ask(kind, each, refused=False) for each in known]
            # Losing the index costs speed only; a row that lies may cost its entry.
            tally.check("counted_as_miss", kind, "miss" not in answers)
        shutil.rmtree(root)
        tally.say(count)


_STATEMENTS: Final = {
    "rows that name each other's manifests": (
        "UPDATE entries SET manifest = (SELECT manifest FROM entries AS e WHERE e.key > entries.key LIMIT 1)"
        " WHERE key < (SELECT max(key) FROM entries)"
    ),
    "keys exchanged": "UPDATE entries SET key = replace(key, 'ttc1-', 'ttc0-')",
    "rows of no manifest": "UPDATE entries SET manifest = x''",
    "rows gone": "DELETE FROM entries WHERE key IN (SELECT key FROM entries LIMIT 3)",
    "all rows gone": "DELETE FROM entries",
    "a table gone": "DROP TABLE entries",
    "facts gone": "DELETE FROM facts",
    "a version to come": "PRAGMA user_version = 99",
    "numbers that are words": "UPDATE entries SET size_bytes = 'many', compile_seconds = 'long', pinned = 'yes'",
}


def _damage_index(rng: random.Random, root: Path, known: list[Victim]) -> str:
    path = root / "index.sqlite"
    chosen = rng.random()
    if chosen < 0.5:
        kind, data = accident(rng, ANYWHERE, path.read_bytes())
        path.write_bytes(data)
        return f"index: {kind}"
    if chosen < 0.55:
        path.unlink()
        return "index: no file"
    if chosen < 0.6:
        path.with_name("index.sqlite-wal").write_bytes(rng.randbytes(5000))
        return "index: a log of garbage"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        if chosen < 0.75:
            target, other = rng.sample(known, 2)
            _, data = accident(rng, ANYWHERE, manifest_of(target.entry).to_bytes())
            lying = _named(manifest_of(target.entry), other.raw).to_bytes()
            data = data if rng.random() < 0.5 else lying
            connection.execute("UPDATE entries SET manifest = ? WHERE key = ?", (data, target.key))
            return "index: a manifest that lies" if data is lying else "index: a damaged manifest"
        kind = rng.choice(list(_STATEMENTS))
        connection.execute(_STATEMENTS[kind])
        return f"index: {kind}"
