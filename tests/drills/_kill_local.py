"""Kills of processes that work on this machine's own folders: disk tier, its upkeep, small notes, spool."""

from __future__ import annotations

import itertools
import os
import random
import re
import time
from contextlib import closing
from pathlib import Path
from typing import ClassVar, Final

from drills._kill_jobs import LARGEST_BYTES, entry_of, open_disk
from drills._kill_kinds import Kind
from support.nursery import Nursery, Slot, Victim
from torchtpu_cache.compilers.memo import TargetMemo
from torchtpu_cache.counters import Counters
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache.spool import Spool
from torchtpu_cache_core.canonical.alias import AliasStore, alias_name
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout, temp_name
from torchtpu_cache_core.stores.ledger import Ledger
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.stores.reading import occupied_bytes
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for

_HOUR_SECONDS: Final = 3600.0
_ROOMY: Final = 100_000
_KILLS_PER_FOLDER: Final = 12
_RESTART_SECONDS: Final = 120.0
_RESERVED: Final = 5
"""By two writers at a time, in the last two minutes and for a moment."""

_SCANNING_PUTS: Final = 2000
_SPOOL_STEPS: Final = 60
"""Of about six entries, spooled and sent."""

_SPOOL_SECONDS: Final = 0.03


class _Disk(Kind):
    """Kills around one disk store after the other."""

    limit_entries: ClassVar[int] = _ROOMY
    tidies_early: ClassVar[bool] = True
    """At each check; else only once a folder has seen all its kills."""

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random) -> None:
        super().__init__(nursery, folder, chance)
        self.roots = itertools.count()
        self.labels = itertools.count()
        self.begin()

    def begin(self) -> None:
        """A new, empty folder."""
        self.root = self.folder / str(next(self.roots))
        self.killed_here = 0
        self.ahead_seconds = 0.0
        self.written: dict[Key, Digest] = {}
        self.acknowledged: set[Key] = set()

    def note(self, label: str, victim: Victim) -> None:
        """Takes down what a dead writer may have written, and what it was acknowledged."""
        for number in range(victim.page[Slot.BEGUN]):
            entry = entry_of(label, number)
            self.written[entry.key] = entry.digest
        done = {entry_of(label, int(line)).key for line in victim.acknowledged()}
        self.acknowledged |= done
        self.tally.acknowledged += len(done)

    def check(self) -> None:
        self.tally.checks += 1
        clock = ManualClock()
        store = open_disk(self.root, self.limit_entries, clock)
        self.check_readable(store)
        full = self.killed_here >= _KILLS_PER_FOLDER
        if full or self.tidies_early:
            self.ahead_seconds += 2 * _HOUR_SECONDS
            clock.advance(self.ahead_seconds)
            self.tend(store, clock)
            self.check_folder(store)
        if full:
            self.begin()

    def check_readable(self, store: DiskStore) -> None:
        tally = self.tally
        report = store.verify(repair=False)
        tally.bad_reads += [f"{bad.key.short}: {bad.reason}" for bad in report.bad]
        tally.bad_reads += [f"{key.short}: {why}" for key, why in report.unreadable]
        tally.bad_reads += [f"{i.key.short}: unheard of" for i in store.iterate() if i.key not in self.written]
        for key, digest in self.written.items():
            try:
                stored = store.get(key)
            except CorruptEntry as error:
                tally.bad_reads.append(f"{key.short}: {error}")
                continue
            if stored is None:
                self.missing(key)
            elif stored.entry.digest != digest:
                tally.bad_reads.append(f"{key.short}: another entry than was put")

    def missing(self, key: Key) -> None:
        if key in self.acknowledged:
            self.tally.lost.append(key.short)

    def tend(self, store: DiskStore, clock: ManualClock) -> None:
        """Lets the store tidy up, by a command or only by the puts of later jobs."""
        if self.chance.random() < 0.7:
            store.gc()
            return
        since = clock.time() - 1
        label = f"later {next(self.labels)}"
        for number in range(_SCANNING_PUTS):
            entry = entry_for(f"{label} {number}", size_bytes=100, compile_seconds=0.0)
            store.put(entry)
            self.written[entry.key] = entry.digest
            ledger = self.ledger()
            if ledger is not None and min(ledger.scanned_seconds) >= since:
                return
        self.tally.account_off.append(f"{_SCANNING_PUTS} puts did not look at every shard")

    def check_folder(self, store: DiskStore) -> None:
        """Nothing but entries is left, and the account says how many."""
        layout, tally = Layout(self.root, DEFAULT_NAMESPACE), self.tally
        files = {path for path in self.root.rglob("*") if path.is_file()}
        entries = files & {layout.entry(key) for key in self.written}
        known = entries | {layout.account, self.root / "machine.key"} | self.foreign()
        self.found_leftovers((path for path in files if path.parent != layout.quarantine), known, self.root)
        ledger = self.ledger()
        size = sum(occupied_bytes(path.lstat()) for path in entries)
        stats = store.stats()
        if ledger is None or any(ledger.reservations) or any(ledger.reserved_bytes):
            tally.account_off.append("room is reserved for nobody")
        if (stats.entries, stats.size_bytes) != (len(entries), size):
            tally.account_off.append(f"{stats.entries} entries, {stats.size_bytes} bytes: {len(entries)}, {size} exist")
        if len(entries) > self.limit_entries or size > self.limit_entries * LARGEST_BYTES:
            tally.account_off.append(f"over the limit: {len(entries)} entries, {size} bytes")

    def ledger(self) -> Ledger | None:
        """The account as it stands on the disk: None where it cannot be read, an empty one where there is none."""
        try:
            return Ledger.from_bytes(Layout(self.root, DEFAULT_NAMESPACE).account.read_bytes())
        except FileNotFoundError:
            return Ledger()

    def foreign(self) -> set[Path]:
        """What others have put there."""
        return set()


class Puts(_Disk):
    """Two writers at a time into a store with room."""

    name = "put"

    def kill(self) -> None:
        began = {}
        for _ in range(2):
            label = f"writer {next(self.labels)}"
            began[label] = self.start(
                "put",
                root=str(self.root),
                label=label,
                limit_entries=self.limit_entries,
                ahead_seconds=self.ahead_seconds,
            )
        for label, victim in began.items():
            self.end(victim)
            self.note(label, victim)
            self.killed_here += 1


class Evictions(Puts):
    """The same into a store that has room for few, so that nearly every put evicts, by jobs that start every other
    minute. Nothing need stay, but not for what dead writers had reserved."""

    name = "evict"
    limit_entries = 10
    tidies_early = False

    def kill(self) -> None:
        super().kill()
        self.ahead_seconds += _RESTART_SECONDS

    def missing(self, key: Key) -> None:
        pass

    def check_readable(self, store: DiskStore) -> None:
        super().check_readable(store)
        ledger = self.ledger()
        reserved = 0 if ledger is None else sum(ledger.reservations)
        if reserved > _RESERVED:
            self.tally.account_off.append(
                f"room for {reserved} entries of {self.limit_entries} is reserved for the dead"
            )


class Upkeep(_Disk):
    """`gc` and `verify --repair` over entries, bad entries, leftovers of dead writers and files of others."""

    name = "upkeep"
    last_operation = 1
    any_step = 1.0  # the first operation has far more to do than the later ones

    def kill(self) -> None:
        self._plant()
        victim = self.start(
            "tend", root=str(self.root), limit_entries=self.limit_entries, verify_first=self.chance.random() < 0.5
        )
        self.end(victim)
        self.killed_here += 1

    def _plant(self) -> None:
        store, layout = open_disk(self.root, self.limit_entries), Layout(self.root, DEFAULT_NAMESPACE)
        label, old = f"planted {next(self.labels)}", time.time() - 2 * _HOUR_SECONDS
        for number in range(6):
            entry = entry_of(label, number)
            store.put(entry)
            self.written[entry.key] = entry.digest
            path = layout.entry(entry.key)
            leftover = path.with_name(temp_name())
            leftover.write_bytes(bytes(self.chance.randrange(5000)))
            os.utime(leftover, (old, old))
            if number % 2:
                damaged = bytearray(path.read_bytes())
                damaged[self.chance.randrange(len(damaged))] ^= 1 << self.chance.randrange(8)
                path.unlink()
                path.write_bytes(damaged)
                self.bad.add(entry.key)
            else:
                self.acknowledged.add(entry.key)
                self.tally.acknowledged += 1
        (path.parent / "of others").write_bytes(b"theirs")

    def begin(self) -> None:
        super().begin()
        self.bad: set[Key] = set()

    def check_readable(self, store: DiskStore) -> None:
        store.verify(repair=True)
        for key in self.bad:
            del self.written[key]
        self.bad.clear()
        super().check_readable(store)

    def foreign(self) -> set[Path]:
        return {path for path in self.root.rglob("of others") if path.read_bytes() == b"theirs"}


class Notes(Kind):
    """The small files of a machine: its key, aliases of programs, memos of compilers and targets."""

    name = "notes"

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random) -> None:
        super().__init__(nursery, folder, chance)
        (folder / "machines").mkdir(mode=0o700)
        library = folder / "library"
        library.write_bytes(bytes(1000))
        os.utime(library, (1.0, 1.0))
        self._labels = itertools.count()
        self._keys: dict[str, str] = {}
        self._aliases: dict[str, int] = {}

    def kill(self) -> None:
        label = f"job {next(self._labels)}"
        victim = self.start("note", folder=str(self.folder), label=label)
        self.end(victim)
        for line in victim.acknowledged():
            number, key = line.split()
            machine = f"{label} {int(number) // 3}"
            if self._keys.setdefault(machine, key) != key:
                self.tally.lost.append(f"the key of {machine}")
            self._aliases[alias_name(label, number)] = int(number)
            self.tally.acknowledged += 1

    def check(self) -> None:
        tally = self.tally
        tally.checks += 1
        for folder in (self.folder / "machines").iterdir():
            key = machine_key(folder).hex()
            if self._keys.setdefault(folder.name, key) != key:
                tally.lost.append(f"the key of {folder.name}")
        aliases = AliasStore(self.folder / "aliases")
        for name, number in self._aliases.items():
            record = aliases.get(name)
            if record is None:
                tally.lost.append(f"alias {name[:12]}")
            elif record != {"number": number}:
                tally.bad_reads.append(f"alias {name[:12]}")
        self._find_leftovers()

    def _find_leftovers(self) -> None:
        """Once an hour is over, the next note in a folder takes them away."""
        two_hours_ago = time.time() - 2 * _HOUR_SECONDS
        for leftover in self.folder.rglob(".note-*"):
            os.utime(leftover, (two_hours_ago, two_hours_ago))
        number = self.tally.checks
        for shard in (self.folder / "aliases").glob("*"):
            AliasStore(self.folder / "aliases").put(f"{shard.name}{number:062x}", {})
        TargetMemo(self.folder / "memo").put(["later", str(number)], {})
        ours = re.compile(r"machine\.key|[0-9a-f]{64}|(identity|target)-[0-9a-f-]+|library")
        files = {path for path in self.folder.rglob("*") if path.is_file()}
        self.found_leftovers(files, {path for path in files if ours.fullmatch(path.name)}, self.folder)


class Spooling(Kind):
    """A job that spools for a real service and uploads meanwhile."""

    name = "spool"
    last_operation = 1

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random) -> None:
        super().__init__(nursery, folder, chance)
        self._service = nursery.start("serve", data=str(folder / "data"), limit_bytes=1 << 40)
        self._service.wait_ready()
        self._url = self._service.acknowledged()[0]
        self._remote = RemoteStore(self._url, DEFAULT_NAMESPACE, connect_seconds=5.0, answer_seconds=30.0)
        self._labels = itertools.count()
        self.tally.most_steps = self.tally.usual_steps = _SPOOL_STEPS
        self._seconds = _SPOOL_SECONDS
        self._begin()

    def _begin(self) -> None:
        self._spool = self.folder / f"spool {next(self._labels)}"
        self._written: dict[Key, Digest] = {}
        self._acknowledged: set[Key] = set()

    def kill(self) -> None:
        label = f"spooler {next(self._labels)}"
        victim = self.start("spool", folder=str(self._spool), label=label, url=self._url)
        self.end(victim)
        done = [entry_of(label, int(line)) for line in victim.acknowledged()]
        for entry in (*done, entry_of(label, len(done))):
            self._written[entry.key] = entry.digest
        self._acknowledged |= {entry.key for entry in done}
        self.tally.acknowledged += len(done)
        waiting = {path.name for path in self._spool.glob("*")} - {"sent"}
        self.tally.inside -= not waiting  # between two uploads, and nothing under way
        lost = {key for key in self._acknowledged - waiting if not self._remote.contains(key)}
        self.tally.lost += [f"{key.short}: neither spooled nor sent" for key in lost]

    def check(self) -> None:
        tally = self.tally
        tally.checks += 1
        with closing(self._open(SYSTEM_CLOCK)) as spool:
            spool.resume()
            spool.drain(20.0)
        for key, digest in self._written.items():
            stored = self._remote.get(key)
            if stored is None and key in self._acknowledged:
                tally.lost.append(f"{key.short}: not sent after a restart")
            elif stored is not None and stored.entry.digest != digest:
                tally.bad_reads.append(f"{key.short}: another entry than was spooled")
        a_day_later = ManualClock()
        a_day_later.advance(26 * _HOUR_SECONDS)
        with closing(self._open(a_day_later)) as spool:
            spool.resume()
        self.found_leftovers((path for path in self._spool.rglob("*") if path.is_file()), set(), self._spool)
        self._begin()

    def _open(self, clock: Clock) -> Spool:
        return Spool(self._spool, self._remote, Counters(), limit_bytes=1 << 30, clock=clock)

    def close(self) -> None:
        self._remote.close()
        self._service.kill()
        self._service.reap()
