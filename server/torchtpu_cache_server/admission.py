"""Room: what may come in, and what has to go for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.entry import MAX_ENTRY_BYTES
from torchtpu_cache_core.errors import ConfigError, EntryTooLarge, FailureKind, StoreFull, StoreUnavailable
from torchtpu_cache_server.blobs.bucket import Bucket
from torchtpu_cache_server.index.base import Index, Record, charged_bytes

MAX_EVICTIONS_PER_PUT: Final = 64
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
    """Reserves room before anything is received. Thread-safe.

    Args:
        evict: closes one entry; it is called without a lock held.
    """

    def __init__(self, limits: Limits, bucket: Bucket, index: Index, evict: Callable[[Record], None]) -> None:
        self.limits = limits
        self._bucket = bucket
        self._index = index
        self._evict = evict
        self._lock = threading.Lock()  # guards what is reserved
        self._reserved_bytes = 0
        self._reserved_entries = 0

    @contextlib.contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Room for one entry while the block runs.

        Raises:
            EntryTooLarge: over a limit that no eviction can help with.
            StoreFull: at most 64 entries were evicted, and it is still too tight.
            StoreUnavailable: the index is in doubt, so that nothing can be evicted now.
        """
        charge = charged_bytes(size_bytes)
        self.check_size(size_bytes)
        with self._lock:
            self._reserved_bytes += charge
            self._reserved_entries += 1
        try:
            self._make_room()
            yield
        finally:
            with self._lock:
                self._reserved_bytes -= charge
                self._reserved_entries -= 1

    def check_size(self, size_bytes: int) -> None:
        """EntryTooLarge if no eviction can help."""
        if size_bytes > self.limits.max_entry_bytes:
            raise EntryTooLarge(size_bytes, self.limits.max_entry_bytes)
        if charged_bytes(size_bytes) > self.limits.limit_bytes:
            raise EntryTooLarge(size_bytes, self.limits.limit_bytes)

    def _is_tight(self) -> bool:
        totals = self._index.totals()
        with self._lock:
            reserved_bytes, reserved_entries = self._reserved_bytes, self._reserved_entries
        if totals.charged_bytes + reserved_bytes > self.limits.limit_bytes:
            return True
        if totals.entries + reserved_entries > self.limits.limit_entries:
            return True
        space = self._bucket.space()
        if space is None:
            return False
        # What is being received counts twice, as reserved and as gone from the disk: on the safe side.
        spare_bytes = min(self.limits.min_free_bytes, space.total_bytes // 20)
        return space.free_bytes - reserved_bytes < spare_bytes

    def _make_room(self) -> None:
        evicted = 0
        while self._is_tight():
            if not self._index.complete:
                raise StoreUnavailable("the index is being rebuilt; there is no room without it", FailureKind.IO, 5.0)
            victims = self._index.victims(min(_BATCH, MAX_EVICTIONS_PER_PUT - evicted))
            if not victims:
                raise StoreFull("the service is full, and nothing more can be evicted for one entry")
            for victim in victims:
                if not self._is_tight():
                    return
                self._index.inflate([victim])
                self._evict(victim)
                evicted += 1
