"""What the victims of `kill` do, each until it is killed. Entry `number` of `label` has the same bytes everywhere."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Final

from support.nursery import Steps
from support.wallclock import JumpingClock
from torchtpu_cache.compilers.memo import TargetMemo
from torchtpu_cache.counters import Counters
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache.spool import Spool
from torchtpu_cache_core.canonical.alias import AliasStore, alias_name
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_server import serving
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.upkeep import Upkeep

_SIZES: Final = (1_000, 12_000, 150_000)
LARGEST_BYTES: Final = 160_000
"""More than any entry here."""


def entry_of(label: str, number: int) -> Entry:
    """Small ones and larger ones, in turn."""
    return entry_for(f"{label} {number}", size_bytes=_SIZES[number % len(_SIZES)])


def open_disk(root: Path, limit_entries: int, clock: Clock = SYSTEM_CLOCK) -> DiskStore:
    """With room for `limit_entries` of whatever size."""
    return DiskStore(
        root,
        DEFAULT_NAMESPACE,
        limit_bytes=limit_entries * LARGEST_BYTES,
        limit_entries=limit_entries,
        min_free_bytes=0,
        clock=clock,
    )


def put(steps: Steps, root: str, label: str, limit_entries: int, ahead_seconds: float) -> None:
    """Puts into a disk store, every other entry with an attestation, by a clock that may be ahead."""
    folder = Path(root)
    key = machine_key(folder)
    store = open_disk(folder, limit_entries, JumpingClock(ahead_seconds))
    steps.ready()
    for number in itertools.count():
        entry = entry_of(label, number)
        attestation = Attestation.by_machine(key, DEFAULT_NAMESPACE, entry) if number % 2 else None
        with steps.operation():
            store.put(entry, attestation)
        steps.acknowledge(str(number))


def tend(steps: Steps, root: str, limit_entries: int, verify_first: bool) -> None:
    """`cache gc` and `cache verify --repair`, in turn."""
    store = open_disk(Path(root), limit_entries)
    steps.ready()
    for number in itertools.count():
        with steps.operation():
            if number % 2 == verify_first:
                store.gc()
            else:
                store.verify(repair=True)


def note(steps: Steps, folder: str, label: str) -> None:
    """Makes the small files of a machine: its key, aliases, memos of compilers and of targets."""
    root = Path(folder)
    library = root / "library"
    steps.ready()
    for number in itertools.count():
        name = alias_name(label, str(number))
        with steps.operation():
            key = machine_key(root / "machines" / f"{label} {number // 3}")
            AliasStore(root / "aliases").put(name, {"number": number})
            FileIdentities(root / "memo").sha256(library)
            TargetMemo(root / "memo").put([label, str(number)], {"number": str(number)})
        steps.acknowledge(f"{number} {key.hex()}")


def spool(steps: Steps, folder: str, label: str, url: str) -> None:
    """Keeps entries for a remote, while the uploader sends them."""
    remote = RemoteStore(url, DEFAULT_NAMESPACE, connect_seconds=5.0, answer_seconds=30.0)
    spool = Spool(Path(folder), remote, Counters(), limit_bytes=1 << 30)
    spool.resume()
    steps.always()
    for number in itertools.count():
        if not spool.add(entry_of(label, number), durable=True):
            raise RuntimeError("the spool kept nothing")
        steps.acknowledge(str(number))
        if number % 5 == 4:
            spool.drain(5.0)


def index(steps: Steps, data: str, label: str, seed: int) -> None:
    """The service without HTTP, from its start: upkeep, puts, reads with their uses noted, deletes."""
    chance = random.Random(seed)
    root = Path(data)
    with Service(FileBucket(root), SqliteIndex(root / "index.sqlite")) as service:
        steps.ready()
        with steps.operation():
            Upkeep(service).run_once()
        for number in itertools.count():
            entry = entry_of(label, number)
            with steps.operation():
                service.put(DEFAULT_NAMESPACE, entry)
            steps.acknowledge(f"put {number}")
            old = entry_of(label, chance.randrange(number + 1))
            if chance.random() < 0.5:
                with steps.operation():
                    found = service.open(DEFAULT_NAMESPACE, old.key)
                    service.flush_touches()
                if found is not None:
                    found.close()
            if number % 3 == 2:
                gone = number - chance.randrange(3)
                steps.acknowledge(f"deleting {gone}")
                with steps.operation():
                    service.delete(DEFAULT_NAMESPACE, entry_of(label, gone).key)
                steps.acknowledge(f"deleted {gone}")


def serve(steps: Steps, data: str, limit_bytes: int, from_start: bool = False) -> None:
    """The service as `torchtpu-cache serve` runs it. The first line that it acknowledges is its URL.

    Args:
        from_start: counts its start, too.
    """

    def ready(url: str) -> None:
        steps.acknowledge(url)
        steps.always()

    if from_start:
        steps.always()
    serving.serve(
        listen=serving.Listen.parse("127.0.0.1:0"),
        data_dir=Path(data),
        limits=Limits(limit_bytes=limit_bytes),
        ready=ready,
    )
