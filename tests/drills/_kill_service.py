"""Kills of the service: its index and bucket alone, and the whole process while clients write."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Final

from drills._kill_jobs import entry_of
from drills._kill_kinds import Kind
from support.nursery import Nursery, Slot
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, StoreError
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.index.base import charged_bytes
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.store import ServiceStore
from torchtpu_cache_server.upkeep import Upkeep

_KILLS_PER_FOLDER: Final = 15
_TWO_DAYS_SECONDS: Final = 2 * 86_400.0
_CLIENTS: Final = 3
_NO_LIMIT: Final = 1 << 40
_FEW_BYTES: Final = 1 << 20
_STEPS: Final = 100
"""Of about three puts of three clients."""

_AT_START: Final = 0.2
_START_STEPS: Final = 60
"""Of which the last are the first round of upkeep."""

_START_SECONDS: Final = 2.0
_MOMENT_SECONDS: Final = 0.15
_READ_BACK: Final = 40
_DELETED: Final = 0.25


class _Data(Kind):
    """Kills around one data folder after the other."""

    limit_bytes: ClassVar[int] = _NO_LIMIT

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random) -> None:
        super().__init__(nursery, folder, chance)
        self.labels = itertools.count()
        self._folders = itertools.count()
        self._begin()

    def _begin(self) -> None:
        self.data = self.folder / str(next(self._folders))
        self.killed_here = 0
        self.written: dict[Key, Digest] = {}
        self.present: set[Key] = set()
        self.absent: set[Key] = set()
        """Acknowledged as put, and as deleted; what was under way is in neither."""

    def check(self) -> None:
        self.tally.checks += 1
        clock = ManualClock()
        bucket, index = FileBucket(self.data), SqliteIndex(self.data / "index.sqlite")
        with Service(bucket, index, limits=Limits(limit_bytes=self.limit_bytes), clock=clock) as service:
            upkeep = Upkeep(service)
            store = ServiceStore(service, DEFAULT_NAMESPACE)
            if self.chance.random() < 0.5:
                self._check_readable(store)  # before the index is in order, too
            upkeep.run_once()
            self._check_readable(store)
            clock.advance(_TWO_DAYS_SECONDS)
            upkeep.run_once()
            self._check_folder(service)
        if self.killed_here >= _KILLS_PER_FOLDER:
            self._begin()

    def _check_readable(self, store: ServiceStore) -> None:
        tally = self.tally
        for key, digest in self.written.items():
            try:
                stored = store.get(key)
            except CorruptEntry as error:
                tally.bad_reads.append(f"{key.short}: {error}")
                continue
            if stored is None and key in self.present and self.limit_bytes == _NO_LIMIT:
                tally.lost.append(key.short)
            elif stored is not None and key in self.absent:
                tally.lost.append(f"{key.short}: its deletion")
            elif stored is not None and stored.entry.digest != digest:
                tally.bad_reads.append(f"{key.short}: another entry than was put")

    def _check_folder(self, service: Service) -> None:
        """Nothing but open entries and tombstones is left, and the index says the same."""
        tally, counted = self.tally, {}
        # What the service keeps back of a disk that fills up is as it should be, all of it.
        kept = {self.data / "lock", *(self.data / "reserve" / str(number) for number in range(16))}
        for folder in (self.data / "entries" / DEFAULT_NAMESPACE).glob("*"):
            numbers = {path.name: path for path in folder.iterdir()}
            closed = max((int(name.removesuffix(".dead")) for name in numbers if name.endswith(".dead")), default=0)
            kept.add(folder / f"{closed}.dead")
            number = max((int(name) for name in numbers if name.isdigit()), default=0)
            if number > closed:
                manifest = Manifest.from_bytes(numbers[str(number)].read_bytes())
                kept |= {folder / str(number), self.data / "blobs/sha256" / manifest.digest[:2] / manifest.digest}
                counted[manifest.key] = charged_bytes(manifest.size_bytes)
        files = (path for path in self.data.rglob("*") if path.is_file() and not path.name.startswith("index.sqlite"))
        self.found_leftovers(files, kept, self.data)
        listed = {info.key for info in ServiceStore(service, DEFAULT_NAMESPACE).iterate()}
        stats = service.stats()
        if not service.index.complete:
            tally.account_off.append("the index is not complete")
        if listed != set(counted):
            tally.account_off.append(f"{len(listed)} entries are listed, {len(counted)} exist")
        if (stats.entries, stats.size_bytes) != (len(counted), sum(counted.values())):
            tally.account_off.append(f"{stats.size_bytes} bytes are counted, {sum(counted.values())} exist")
        if stats.size_bytes > self.limit_bytes:
            tally.account_off.append(f"over the limit: {stats.size_bytes} bytes")


class IndexUpdates(_Data):
    """Bucket and index in one process without HTTP, so that every step and statement of it is hit."""

    name = "index"
    last_operation = 10  # its first delete is its eighth at the latest

    def kill(self) -> None:
        label, seed = f"writer {next(self.labels)}", self.chance.randrange(1 << 30)
        victim = self.start("index", data=str(self.data), label=label, seed=seed)
        self.end(victim)
        self.killed_here += 1
        puts = 0
        for line in victim.acknowledged():
            what, number = line.split()
            entry = entry_of(label, int(number))
            self.written[entry.key] = entry.digest
            puts += what == "put"
            if what == "put":
                self.present.add(entry.key)
            else:
                self.present.discard(entry.key)
            if what == "deleted":
                self.absent.add(entry.key)
        under_way = entry_of(label, puts)
        self.written[under_way.key] = under_way.digest
        self.tally.acknowledged += puts


class ServicePuts(_Data):
    """The whole service, killed while three clients put, and delete some, or at a step of its start."""

    name = "service_put"

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random) -> None:
        super().__init__(nursery, folder, chance)
        self._lock = threading.Lock()  # guards what clients note
        self._under_way = 0
        self.tally.most_steps = self.tally.usual_steps = _STEPS

    def kill(self) -> None:
        self.killed_here += 1
        if self.chance.random() < _AT_START:
            self._kill_at_start()
            return
        victim = self.nursery.start("serve", data=str(self.data), limit_bytes=self.limit_bytes)
        victim.wait_ready()
        url = victim.acknowledged()[0]
        self._read_back(url)
        seeds = [self.chance.random() for _ in range(_CLIENTS)]
        clients = [threading.Thread(target=self._client, args=(url, seed), daemon=True) for seed in seeds]
        began = time.monotonic()
        for client in clients:
            client.start()
        time.sleep(self.chance.uniform(0.0, _MOMENT_SECONDS))
        page, armed = victim.page, 0
        if self.chance.random() < 0.5:
            armed = page[Slot.CALLS]
            page[Slot.TORN] = self.chance.randrange(2)
            page[Slot.DIE_AT] = armed + self.chance.randint(1, _STEPS)
            victim.wait_dead(5.0)
        was_idle = not self._under_way
        victim.kill()
        page[Slot.CALLS] -= armed
        self.finish(victim, began)
        self.tally.inside -= was_idle and not page[Slot.DIED_AT]
        for client in clients:
            client.join(60)

    def _kill_at_start(self) -> None:
        slots = {Slot.DIE_AT: self.chance.randint(1, _START_STEPS), Slot.TORN: self.chance.randrange(2)}
        victim = self.nursery.start("serve", slots, data=str(self.data), limit_bytes=self.limit_bytes, from_start=True)
        began = time.monotonic()
        victim.wait_dead(_START_SECONDS)
        self.finish(victim, began)

    def _read_back(self, url: str) -> None:
        """What the killed one had acknowledged, from the next, which may still be putting its index in order."""
        with closing(_remote(url)) as store:
            for key in self.chance.sample(sorted(self.written), min(_READ_BACK, len(self.written))):
                stored = store.get(key)
                if stored is None and key in self.present and self.limit_bytes == _NO_LIMIT:
                    self.tally.lost.append(f"{key.short}: not there after the restart")
                elif stored is not None and (key in self.absent or stored.entry.digest != self.written[key]):
                    self.tally.bad_reads.append(f"{key.short}: deleted, or another entry than was put")

    def _client(self, url: str, seed: float) -> None:
        """Puts, and deletes some, until the service is gone."""
        chance = random.Random(seed)
        with closing(_remote(url)) as store, suppress(StoreError):
            for number in itertools.count():
                entry = entry_of(f"client {seed}", number)
                with self._asking(entry):
                    created = store.put(entry).status is PutStatus.CREATED
                if not created:
                    continue
                with self._lock:
                    self.present.add(entry.key)
                    self.tally.acknowledged += 1
                if chance.random() < _DELETED:
                    with self._asking(entry):
                        store.delete(entry.key)
                    with self._lock:
                        self.absent.add(entry.key)

    @contextmanager
    def _asking(self, entry: Entry) -> Iterator[None]:
        """While a request is under way, nothing is known of its entry."""
        with self._lock:
            self.written[entry.key] = entry.digest
            self.present.discard(entry.key)
            self._under_way += 1
        yield
        with self._lock:
            self._under_way -= 1


class ServiceEvictions(ServicePuts):
    """The same into a service with room for few, so that nearly every put evicts. Nothing need stay."""

    name = "service_evict"
    limit_bytes = _FEW_BYTES


def _remote(url: str) -> RemoteStore:
    """With the patience that a loaded machine needs."""
    return RemoteStore(url, DEFAULT_NAMESPACE, connect_seconds=5.0, answer_seconds=30.0)
