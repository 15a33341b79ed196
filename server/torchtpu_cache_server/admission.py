"""Room: what may come in, and what has to go for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import MAX_ENTRY_BYTES
from torchtpu_cache_core.errors import ConfigError, EntryTooLarge, FailureKind, StoreFull, StoreUnavailable
from torchtpu_cache_core.stores.reading import rounded_bytes
from torchtpu_cache_server.blobs.bucket import Bucket
from torchtpu_cache_server.index.base import Index, Record, charged_bytes

MAX_EVICTIONS_PER_PUT: Final = 64
"""Beside those that make room for the bytes themselves, if every victim were the least there can be. Without a bound,
the first put after a limit was lowered would have to evict all that is too much."""

_BATCH: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much the service may hold.

    Args:
        limit_bytes: of all entries, each counted in whole blocks with its manifest (`index.base.charged_bytes`).
        limit_entries: of all namespaces together.
        max_entry_bytes: of one entry.
        min_free_bytes: what stays free on the disk for others, but no more than a twentieth of it.

    Raises:
        ConfigError: a limit below what makes sense.
    """

    limit_bytes: int = 20 << 30
    limit_entries: int = 1_000_000
    max_entry_bytes: int = MAX_ENTRY_BYTES
    min_free_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.limit_bytes <= 0 or self.limit_entries <= 0 or self.min_free_bytes < 0:
            raise ConfigError("a limit of the service must be above zero, such as 50GB")
        if not 0 < self.max_entry_bytes <= MAX_ENTRY_BYTES:
            raise ConfigError(f"an entry may have between 1 and {MAX_ENTRY_BYTES:,} bytes")


class Admission:
    """Makes room for entries as their bytes arrive. Thread-safe.

    Args:
        evict: closes one entry; it is called without a lock held.
    """

    def __init__(
        self,
        limits: Limits,
        bucket: Bucket,
        index: Index,
        evict: Callable[[Record], None],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.limits = limits
        self._bucket = bucket
        self._index = index
        self._evict = evict
        self._clock = clock
        self._lock = threading.Lock()  # guards what is taken
        self._taken_bytes = 0
        self._taken_entries = 0

    @contextlib.contextmanager
    def reserve(self, size_bytes: int) -> Iterator[Reservation]:
        """Room for one entry while the block runs. Nothing is evicted for what is only announced.

        Raises:
            EntryTooLarge: over a limit that no eviction can help with.
            StoreFull: it is tight, and nothing can be evicted, or all of it were not enough on a disk that others fill.
            StoreUnavailable: it is tight, and the index is in doubt, so that nothing can be evicted now.
        """
        self.check_size(size_bytes)
        if self._is_tight(charged_bytes(size_bytes), 1):
            self._check_evictable(charged_bytes(size_bytes))
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.take(-reservation.taken_bytes, -reservation.taken_entries)

    def check_size(self, size_bytes: int) -> None:
        """EntryTooLarge if no eviction can help."""
        if size_bytes > self.limits.max_entry_bytes:
            raise EntryTooLarge(size_bytes, self.limits.max_entry_bytes)
        if charged_bytes(size_bytes) > self.limits.limit_bytes:
            raise EntryTooLarge(size_bytes, self.limits.limit_bytes)

    def take(self, size_bytes: int, entries: int) -> None:
        """Counts what is on its way in besides what the index counts."""
        with self._lock:
            self._taken_bytes += size_bytes
            self._taken_entries += entries

    def evict(self, most: int) -> int:
        """Evicts until the limits are kept, and gives how many had to go; StoreFull if `most` do not suffice."""
        evicted = 0
        while self._is_tight():
            for victim in self._victims(min(_BATCH, most - evicted)):
                if not self._is_tight():
                    break
                self._evict(victim)
                evicted += 1
        return evicted

    def _is_tight(self, more_bytes: int = 0, more_entries: int = 0) -> bool:
        totals = self._index.totals()
        with self._lock:
            taken_bytes, taken_entries = self._taken_bytes + more_bytes, self._taken_entries + more_entries
        if totals.charged_bytes + taken_bytes > self.limits.limit_bytes:
            return True
        if totals.entries + taken_entries > self.limits.limit_entries:
            return True
        return self._lacking_bytes(taken_bytes) > 0

    def _lacking_bytes(self, taken_bytes: int) -> int:
        """How much more must be free on the disk."""
        space = self._bucket.space()
        if space is None:
            return 0
        # What is being received counts twice, as taken and as gone from the disk: on the safe side.
        spare_bytes = min(self.limits.min_free_bytes, space.total_bytes // 20)
        return spare_bytes + taken_bytes - space.free_bytes

    def _check_evictable(self, more_bytes: int = 0) -> None:
        if not self._index.complete:
            raise StoreUnavailable("the index is being rebuilt; there is no room without it", FailureKind.IO, 5.0)
        totals = self._index.totals()
        with self._lock:
            taken_bytes = self._taken_bytes + more_bytes
        # Where others fill the disk, dropping all that is here would help nobody.
        if not totals.entries or self._lacking_bytes(taken_bytes) > totals.charged_bytes:
            raise _full()

    def _victims(self, limit: int) -> list[Record]:
        self._check_evictable()
        victims = self._index.victims(limit, self._clock.time())
        if not victims:
            raise _full()
        return victims


class Reservation:
    """What one entry has taken so far. One thread at a time. Both methods raise what `Admission.reserve` does, and
    StoreFull when as many entries were evicted as may be for this one, and it is still too tight."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._received_bytes = 0
        self._evicted = 0
        self.taken_bytes = 0
        self.taken_entries = 0

    def arrived(self, size_bytes: int) -> None:
        """So many more bytes are about to be written."""
        self._received_bytes += size_bytes
        self._take(rounded_bytes(self._received_bytes), 0)

    def complete(self) -> None:
        """All are there, and the entry is about to be published."""
        self._take(charged_bytes(self._received_bytes), 1)

    def _take(self, taken_bytes: int, taken_entries: int) -> None:
        self._admission.take(taken_bytes - self.taken_bytes, taken_entries - self.taken_entries)
        self.taken_bytes, self.taken_entries = taken_bytes, taken_entries
        most = MAX_EVICTIONS_PER_PUT + taken_bytes // charged_bytes(0)
        self._evicted += self._admission.evict(most - self._evicted)


def _full() -> StoreFull:
    return StoreFull("the service is full, and nothing more can be evicted for one entry")
