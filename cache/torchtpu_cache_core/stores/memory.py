"""The memory tier: entries of this process, least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import EntryTooLarge
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, PutStatus, Store, Stored, StoreStats
from torchtpu_cache_core.stores.immutable import immutable
from torchtpu_cache_core.stores.listing import entry_info


@dataclass(slots=True)
class _Held:
    stored: Stored
    size_bytes: int
    accessed_seconds: float


class MemoryStore(Store):
    """Entries in this process's memory.

    Args:
        limit_bytes: of stored and unpacked bytes together, because an entry keeps its executable once it was asked
            for. What a caller still holds after an eviction is the caller's, and not counted.
        limit_entries: how many entries at most, or None.
        clock: for the times that a listing shows.
    """

    def __init__(self, *, limit_bytes: int, limit_entries: int | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._limit_bytes = limit_bytes
        self._limit_entries = limit_entries
        self._clock = clock
        self._lock = threading.RLock()  # guards all below; held for bookkeeping only
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._size_bytes = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="memory", evicts=True, keeps_attestation=True)

    def get(self, key: Key) -> Stored | None:
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            self._held.move_to_end(key)
            held.accessed_seconds = self._clock.time()
            return held.stored

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        size = entry.size_bytes + entry.header.executable_bytes
        if size > self._limit_bytes:
            raise EntryTooLarge(size, self._limit_bytes)
        entry = immutable(entry)
        with self._lock:
            there = self._held.get(entry.key)
            if there is not None:
                digest = there.stored.entry.digest
                status = PutStatus.SAME if digest == entry.digest else PutStatus.CONFLICT
                return PutOutcome(status, digest, there.stored.attestation)
            self._held[entry.key] = _Held(Stored(entry, attestation), size, self._clock.time())
            self._size_bytes += size
            while self._over_limits():
                _, evicted = self._held.popitem(last=False)
                self._size_bytes -= evicted.size_bytes
        return PutOutcome(PutStatus.CREATED, entry.digest, attestation)

    def contains(self, key: Key) -> bool:
        with self._lock:
            return key in self._held

    def delete(self, key: Key) -> bool:
        with self._lock:
            held = self._held.pop(key, None)
            if held is not None:
                self._size_bytes -= held.size_bytes
            return held is not None

    def iterate(self) -> Iterator[EntryInfo]:
        with self._lock:
            held = [(h.stored.entry, h.accessed_seconds) for h in self._held.values()]
        for entry, accessed in held:
            yield entry_info(entry.header, size_bytes=entry.size_bytes, accessed_seconds=accessed)

    def stats(self) -> StoreStats:
        """`size_bytes` counts stored and unpacked bytes, as the limit does."""
        with self._lock:
            return StoreStats(
                entries=len(self._held),
                size_bytes=self._size_bytes,
                limit_bytes=self._limit_bytes,
                limit_entries=self._limit_entries,
            )

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            self._size_bytes = 0

    def _over_limits(self) -> bool:
        too_many = self._limit_entries is not None and len(self._held) > self._limit_entries
        # The newest stays: alone it is within the byte limit.
        return len(self._held) > 1 and (too_many or self._size_bytes > self._limit_bytes)
