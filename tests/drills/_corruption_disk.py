"""Entry files of the disk tier, for the corruption drill."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Final

from support.damage import ANYWHERE, OF_ENTRIES, By, accident, bombed, flip, forgeries
from support.fakes import RawResolver
from support.replies import manifest_of
from support.rig import private
from support.tally import PeakMemory, Tally
from support.victims import KnowingCompiler, Recorder, Victim, victim, victims
from torchtpu_cache.counters import Tier
from torchtpu_cache.node import Node
from torchtpu_cache_core.entry import MAX_ENTRY_BYTES, Entry
from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Namespace
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.stores.wrap import CheckedStore
from torchtpu_cache_core.testing.entries import header_fields, sealed

LARGEST_BYTES: Final = 16 << 20
_NODE_EVERY: Final = 12
_CLEARED_EVERY: Final = 10
"""Cases between which the quarantine is emptied: a full one is looked through each time, which is not what is tried."""

_REWORDED: Final = "behind: a manifest that says something else"


def manifest_block(victim: Victim, namespace: Namespace = DEFAULT_NAMESPACE) -> bytes:
    """A block with the manifest that a service without signatures gives out."""
    return Attestation(manifest=manifest_of(victim.entry, namespace)).to_block()


def mark_block(machine_key: bytes, victim: Victim, namespace: Namespace = DEFAULT_NAMESPACE) -> bytes:
    """A block with a machine's mark."""
    return Attestation.by_machine(machine_key, namespace, victim.entry).to_block()


class DiskAttack:
    """Damages entry files, and asks for them: mostly the store itself, now and then a node with a loader.

    Args:
        root: of the disk tier; a new private folder.
    """

    def __init__(self, root: Path, tally: Tally, known: list[Victim]) -> None:
        self.tally = tally
        self.known = known
        self.rng = random.Random(tally.seed)
        self.layout = Layout(root, DEFAULT_NAMESPACE)
        self.machine_key = machine_key(root)
        self.disk = DiskStore(
            root,
            DEFAULT_NAMESPACE,
            limit_bytes=1 << 40,
            limit_entries=1 << 30,
            min_free_bytes=0,
            machine_key=self.machine_key,
        )
        self.checked = CheckedStore(self.disk)
        self.recorder = Recorder()
        self.compiler = KnowingCompiler(known)
        for each in known:
            path = self.layout.entry(each.key)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.layout.quarantine.mkdir(parents=True, exist_ok=True, mode=0o700)

    def run(self, count: int) -> None:
        turn = 0
        while self.tally.cases < count:
            target, other = self.rng.sample(self.known, 2)
            for kind, data in self._round(target, other):
                turn += 1
                if turn % _CLEARED_EVERY == 0:
                    self._clear_quarantine()
                if turn % _NODE_EVERY == 0:
                    self._through_a_node(kind, target, data)
                else:
                    self._through_the_store(kind, target, data)
            self.tally.say(count)

    def _round(self, target: Victim, other: Victim) -> list[tuple[str, bytes]]:
        """Accidents to one file, each kind of forgery once, and what stands behind the entry exchanged."""
        rng = self.rng
        blocks = [manifest_block(target), mark_block(self.machine_key, target), b""]
        cases = [accident(rng, OF_ENTRIES, target.raw + rng.choice(blocks)) for _ in range(40)]
        if len(target.raw) > 1 << 20:
            return cases  # forgeries of large ones are no others
        for forgery in forgeries(rng, target, other):
            block = rng.choice(blocks)
            if forgery.by is By.DIGEST and not block:
                self._beyond(target, forgery.data)
            else:
                cases.append((f"forged: {forgery.kind}", forgery.data + block))
        cases += [(forgery.kind, forgery.data) for forgery in rng.sample(list(bombed(target)), 8)]
        return cases + [(kind, target.raw + block) for kind, block in self._blocks(target, other)]

    def _blocks(self, target: Victim, other: Victim) -> list[tuple[str, bytes]]:
        rng = self.rng
        manifest, mark = manifest_block(target), mark_block(self.machine_key, target)
        at = rng.randrange(16, len(manifest) - 32)
        flipped = manifest[:at] + flip(rng, manifest[at : at + 1], 1) + manifest[at + 1 : -32]
        mac = Attestation.from_block(mark).machine_mac
        assert mac is not None
        return [
            ("behind: another entry's manifest", manifest_block(other)),
            ("behind: another namespace's manifest", manifest_block(target, Namespace("other"))),
            ("behind: another entry's mark", mark_block(self.machine_key, other)),
            ("behind: another machine's mark", mark_block(rng.randbytes(32), target)),
            ("behind: another namespace's mark", mark_block(self.machine_key, target, Namespace("other"))),
            ("behind: a flipped mark", Attestation(machine_mac=flip(rng, mac, 1)).to_block()),
            ("behind: two blocks", manifest * 2),
            ("behind: another entry", other.raw),
            ("behind: a damaged manifest", accident(rng, ANYWHERE, manifest)[1] or b"?"),
            ("behind: a damaged mark", accident(rng, ANYWHERE, mark)[1] or b"?"),
            (_REWORDED, flipped + hashlib.sha256(flipped).digest()),
        ]

    def _clear_quarantine(self) -> None:
        for path in self.layout.quarantine.iterdir():
            path.unlink()

    def _plant(self, target: Victim, data: bytes) -> Path:
        path = self.layout.entry(target.key)
        path.write_bytes(data)
        return path

    def _through_the_store(self, kind: str, target: Victim, data: bytes) -> None:
        tally, path = self.tally, self._plant(target, data)
        with tally.case(kind):
            try:
                stored = self.checked.get(target.key)
            except CorruptEntry as error:
                tally.refused(error.reason)
                tally.check("not_set_aside", kind, not path.exists())
                return
            if stored is None:
                tally.fault("counted_as_miss", kind)
                return
            self._judge(kind, target, bytes(stored.entry.executable()), data)

    def _judge(self, kind: str, target: Victim, executable: bytes, data: bytes) -> None:
        """An entry was given. Nothing binds an unsigned manifest's other words; without any block it is honest."""
        if executable != target.executable:
            self.tally.fault("reached_a_loader", kind)
        elif kind != _REWORDED and data != target.raw:
            self.tally.fault("accepted", kind)
        else:
            self.tally.served_true += 1

    def _through_a_node(self, kind: str, target: Victim, data: bytes) -> None:
        """The node compiles again, or takes the remote's; its disk tier has a sound entry then."""
        tally, path = self.tally, self._plant(target, data)
        remote = None
        if self.rng.random() < 0.3:
            remote = MemoryStore(limit_bytes=1 << 30)
            remote.put(Entry.parse(target.raw))
        node = Node(resolver=RawResolver(), disk=self.disk, remote=remote, machine_key=self.machine_key)
        with tally.case(kind):
            result = node.answer(target.resolved, self.compiler, load=self.recorder)
            loaded, totals = self.recorder.take(), node.counters.snapshot()
            if any(each != target.executable for each in loaded) or bytes(result.executable) != target.executable:
                tally.fault("reached_a_loader", kind)
            if result.tier is Tier.DISK:
                self._judge(kind, target, bytes(result.executable), data)
                return
            tally.check("counted_as_miss", kind, totals["tier_misses"].get("disk", 0) == 0)
            tally.check("not_counted", kind, totals["failures"] == {"disk.corrupt": 1})
            tally.refused("corrupt, by a node")
            tally.check("crashes", kind, result.tier is (Tier.COMPILED if remote is None else Tier.REMOTE))
        again = self.checked.get(target.key)
        sound = again is not None and bytes(again.entry.executable()) == target.executable
        tally.check("not_replaced", kind, sound)
        path.unlink(missing_ok=True)

    def _beyond(self, target: Victim, data: bytes) -> None:
        """What nothing can tell until entries are signed: told, not judged."""
        self._plant(target, data)
        self.tally.beyond_tried += 1
        try:
            stored = self.checked.get(target.key)
        except CorruptEntry:
            return
        assert stored is not None
        self.tally.beyond_served += bytes(stored.entry.executable()) != target.executable
        self.disk.delete(target.key)

    def memory(self) -> None:
        """Huge files and bombs, after the largest honest entry."""
        large = victim("the largest", LARGEST_BYTES, packs=False)
        path = self.layout.entry(large.key)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(large.raw)
        stored = self.checked.get(large.key)
        assert stored is not None
        assert len(stored.entry.executable()) == LARGEST_BYTES
        del stored
        target = self.known[0]
        self.peak = PeakMemory()
        for forgery in bombed(target):
            for block in (b"", manifest_block(target)):
                self._through_the_store(forgery.kind, target, forgery.data + block)
        for kind, head, size in huge_files(target):
            path = self._plant(target, head)
            os.truncate(path, size)
            with self.tally.case(kind):
                try:
                    self.tally.check("counted_as_miss", kind, self.checked.get(target.key) is not None)
                    self.tally.fault("reached_a_loader", kind)
                except CorruptEntry as error:
                    self.tally.refused(error.reason)


def huge_files(target: Victim) -> list[tuple[str, bytes, int]]:
    """Kind, beginning and size of sparse files that no memory may be spent on."""
    size = 1 << 28
    honest = {**header_fields(target.entry), "codec": "raw", "executable_bytes": size}
    head = sealed(honest, b"", payload_bytes=size)[:-32]
    return [
        ("huge: an entry with 256 MB behind", target.raw, size),
        ("huge: an entry with 30 MB behind", target.raw, 30 << 20),
        ("huge: a terabyte of zeros", b"", 1 << 40),
        ("huge: 256 MB of zeros", b"", size),
        ("huge: the most that an entry may have, of zeros", target.raw[:20], MAX_ENTRY_BYTES),
        ("huge: 256 MB under a right header", head, len(head) + size + 32),
        ("huge: less than the header tells", head, len(head) + size // 2),
    ]


def attack_disk(folder: Path, tally: Tally, count: int) -> None:
    """Entry files of the disk tier."""
    known = victims(40, large=1)
    attack = DiskAttack(private(folder / "disk"), tally, known)
    attack.memory()
    attack.run(count)
    tally.rss_growth_bytes = attack.peak.growth_bytes()
