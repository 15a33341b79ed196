"""The memory store against the contract."""

from __future__ import annotations

from pathlib import Path

from torchtpu_cache_core.store import Store
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.store_suite import Limits, StoreSuite


class TestMemory(StoreSuite):
    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        return MemoryStore(limit_bytes=limits.bytes, limit_entries=limits.entries, clock=clock)
