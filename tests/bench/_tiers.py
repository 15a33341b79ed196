"""The two tiers that evict, without what eviction does not need: no executables, no HTTP, no fsync.

What decides who goes, and counts what is there, is the product's own: account, shards and limits of the disk tier over
real files, index and admission of the service over a real SQLite file. Files are sparse: a real header, then nothing up
to the length that the entry would have.
"""

from __future__ import annotations

import abc
import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from support.fleet import Program
from torchtpu_cache_core.entry import FORMAT_VERSION, MAGIC, PREFIX
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key
from torchtpu_cache_core.stores.disk import ACCESS_MARK_SECONDS
from torchtpu_cache_core.stores.files import FILES
from torchtpu_cache_core.stores.layout import Layout, shard_of
from torchtpu_cache_core.stores.reading import occupied_bytes, rounded_bytes
from torchtpu_cache_core.stores.room import DiskLimits, Room
from torchtpu_cache_core.stores.shards import Shards
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import components_for, key_for
from torchtpu_cache_server.admission import Admission, Limits
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.index.base import EntryName, Record, charged_bytes
from torchtpu_cache_server.index.sqlite import SqliteIndex

BEGIN_SECONDS: Final = 1_700_000_000.0
_ENTRIES: Final = 10_000_000
_FLUSH_SECONDS: Final = 5.0
_NEEDED_BYTES: Final = 32


class Tier(abc.ABC):
    """A tier that is asked for programs, and stores what it does not have.

    Args:
        limit_bytes: what it may hold, as it counts.
        by_cost: False tells it that every program compiles in no time, so that it goes by the last use alone: LRU.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, by_cost: bool) -> None:
        self._limit_bytes = limit_bytes
        self._by_cost = by_cost
        self.clock = ManualClock(BEGIN_SECONDS)

    def ask(self, seconds: float, program: Program) -> bool:
        """Whether it is there at that time; it is afterwards, unless it is over the limit by itself."""
        self.clock.advance(BEGIN_SECONDS + seconds - self.clock.time())
        if self._use(program):
            return True
        if self.charge(program) <= self._limit_bytes:
            self._store(program, program.compile_seconds if self._by_cost else 0.0)
        return False

    @staticmethod
    @abc.abstractmethod
    def charge(program: Program) -> int:
        """What a program's entry counts for."""

    @abc.abstractmethod
    def _use(self, program: Program) -> bool: ...

    @abc.abstractmethod
    def _store(self, program: Program, compile_seconds: float) -> None: ...

    def close(self) -> None:  # noqa: B027 - the disk tier has nothing to close
        pass


class DiskTier(Tier):
    def __init__(self, folder: Path, limit_bytes: int, *, by_cost: bool) -> None:
        super().__init__(folder, limit_bytes, by_cost=by_cost)
        self._layout = Layout(folder, DEFAULT_NAMESPACE)
        self._layout.account.parent.mkdir(parents=True)
        self._room = Room(
            self._layout,
            DiskLimits(limit_bytes=limit_bytes, limit_entries=_ENTRIES, min_free_bytes=0),
            Shards(self._layout, FILES, self.clock),
            clock=self.clock,
            files=FILES,
            set_aside=lambda key, error: None,
        )

    @staticmethod
    def charge(program: Program) -> int:
        return rounded_bytes(program.size_bytes)

    def _use(self, program: Program) -> bool:
        path = self._layout.entry(_key(program.number))
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        now = self.clock.time()
        if now - status.st_mtime > ACCESS_MARK_SECONDS:
            os.utime(path, (now, now))
        return True

    def _store(self, program: Program, compile_seconds: float) -> None:
        key, now = _key(program.number), self.clock.time()
        path, shard = self._layout.entry(key), shard_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._room.reserve(shard, self.charge(program))
        with open(path, "xb") as file:
            file.write(_head(program, compile_seconds, now))
            file.truncate(program.size_bytes)
            file.flush()
            os.utime(file.fileno(), (now, now))
            self._room.settle(shard, self.charge(program), occupied_bytes(os.fstat(file.fileno())))


class ServiceTier(Tier):
    def __init__(self, folder: Path, limit_bytes: int, *, by_cost: bool) -> None:
        super().__init__(folder, limit_bytes, by_cost=by_cost)
        self._index = SqliteIndex(folder / "index.sqlite")
        self._index.set_complete(True)
        self._bucket = FileBucket(folder / "bucket")
        limits = Limits(limit_bytes=limit_bytes, limit_entries=_ENTRIES, min_free_bytes=0)
        self._admission = Admission(limits, self._bucket, self._index, self._evict, clock=self.clock)
        self._there: set[Key] = set()
        self._touched: dict[EntryName, float] = {}
        self._flushed_seconds = BEGIN_SECONDS

    @staticmethod
    def charge(program: Program) -> int:
        return charged_bytes(program.size_bytes)

    def _evict(self, record: Record) -> None:
        self._index.remove(*record.name)
        self._there.remove(record.manifest.key)

    def _use(self, program: Program) -> bool:
        key, now = _key(program.number), self.clock.time()
        if self._touched and now - self._flushed_seconds > _FLUSH_SECONDS:
            self._index.touch(self._touched)
            self._touched.clear()
            self._flushed_seconds = now
        if key not in self._there:
            return False
        self._touched[DEFAULT_NAMESPACE, key] = now
        return True

    def _store(self, program: Program, compile_seconds: float) -> None:
        key, now = _key(program.number), self.clock.time()
        with self._admission.reserve(program.size_bytes) as room:
            room.arrived(program.size_bytes)
            room.complete()
            manifest = Manifest(
                namespace=DEFAULT_NAMESPACE,
                key=key,
                generation=1,
                digest=Digest(f"{program.number:064x}"),
                size_bytes=program.size_bytes,
                writer="bench",
                created_seconds=now,
            )
            self._index.record(
                Record(
                    manifest=manifest,
                    executable_bytes=program.size_bytes,
                    compile_seconds=compile_seconds,
                    created_seconds=now,
                    accessed_seconds=now,
                    target_name="TPU",
                )
            )
            self._there.add(key)

    def close(self) -> None:
        self._index.close()
        self._bucket.close()


class ExactLru:
    """LRU as the books have it: no sample, no coarse marks, nothing freed ahead of need."""

    def __init__(self, limit_bytes: int, charge: Callable[[Program], int]) -> None:
        self._limit_bytes = self._left_bytes = limit_bytes
        self._charge = charge
        self._there: OrderedDict[int, int] = OrderedDict()

    def ask(self, seconds: float, program: Program) -> bool:
        """As `Tier.ask`."""
        if program.number in self._there:
            self._there.move_to_end(program.number)
            return True
        charge = self._charge(program)
        if charge > self._limit_bytes:
            return False
        self._there[program.number] = charge
        self._left_bytes -= charge
        while self._left_bytes < 0:
            self._left_bytes += self._there.popitem(last=False)[1]
        return False

    def close(self) -> None:
        pass


@functools.cache
def _key(number: int) -> Key:
    return key_for(f"program {number}")


def _head(program: Program, compile_seconds: float, now_seconds: float) -> bytes:
    """Prefix and header of the entry."""
    header = Header(
        key=_key(program.number),
        components=tuple(components_for(f"program {program.number}")),
        executable_format="pjrt",
        codec="raw",
        executable_bytes=program.size_bytes,
        producer="bench",
        road="topology",
        compile_seconds=compile_seconds,
        created_seconds=now_seconds,
    ).to_bytes()
    payload_bytes = max(0, program.size_bytes - PREFIX.size - len(header) - _NEEDED_BYTES)
    return PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(header), payload_bytes) + header
