"""A store far away, made of one that is near."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import EntryInfo, PutOutcome, Store, Stored, StoreStats
from torchtpu_cache_core.stores.wrap import Wrapper


class LatencyStore(Wrapper):
    """Waits before every operation, as a store far away does.

    Args:
        seconds: how long.
        sleep: waits; handed in so that a test need not.
    """

    def __init__(self, inner: Store, *, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._sleep = sleep

    def get(self, key: Key) -> Stored | None:
        self._sleep(self._seconds)
        return super().get(key)

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        self._sleep(self._seconds)
        return super().put(entry, attestation)

    def contains(self, key: Key) -> bool:
        self._sleep(self._seconds)
        return super().contains(key)

    def delete(self, key: Key) -> bool:
        self._sleep(self._seconds)
        return super().delete(key)

    def iterate(self) -> Iterator[EntryInfo]:
        self._sleep(self._seconds)
        return super().iterate()

    def stats(self) -> StoreStats:
        self._sleep(self._seconds)
        return super().stats()
