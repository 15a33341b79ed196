"""What the service does on the side: keep room back, flush access times, reconcile the index, collect garbage."""

from __future__ import annotations

import logging
import math
import threading
from typing import Final

from torchtpu_cache_core.errors import CacheError, StoreError
from torchtpu_cache_server.blobs.layout import BLOBS, parse_blob
from torchtpu_cache_server.index.base import EntryName
from torchtpu_cache_server.service import Service

_log = logging.getLogger(__name__)

UNUSED_BLOB_SECONDS: Final = 86_400.0
LEFTOVER_SECONDS: Final = 3_600.0
_PAGE: Final = 500


def reconcile(service: Service, stop: threading.Event | None = None) -> bool:
    """Makes the index say of every key what the bucket says; True if it is complete now.

    It serves meanwhile: what the index does not know yet is asked of the bucket.

    Raises:
        StoreError: the bucket could not be listed.
    """
    catalog, index = service.catalog, service.index
    doubts = catalog.doubts
    for name in catalog.names():
        if stop is not None and stop.is_set():
            return False
        service.synchronise(*name)
    after: EntryName | None = None
    try:
        while names := index.names(after, _PAGE):
            for name in names:
                if stop is not None and stop.is_set():
                    return False
                service.synchronise(*name)
            after = names[-1]
    except StoreError as error:
        catalog.doubt_index(error)
    if catalog.doubts != doubts:
        return False
    index.set_complete(True)
    return True


def collect(service: Service, stop: threading.Event | None = None) -> int:
    """Removes blobs that nothing names for a day, and what dead writers left; gives how many.

    Raises:
        StoreError: the bucket could not be listed.
    """
    now = service.clock.time()
    removed = service.bucket.collect_leftovers(now - LEFTOVER_SECONDS)
    for found in service.bucket.list(BLOBS):
        if (stop is not None and stop.is_set()) or not service.index.complete:
            break
        digest = parse_blob(found.name)
        if digest is not None and found.modified_seconds < now - UNUSED_BLOB_SECONDS:
            removed += service.catalog.release_blob(digest, now - UNUSED_BLOB_SECONDS)
    return removed


class Upkeep:
    """Runs rounds of upkeep in a thread of its own until it is stopped.

    Args:
        interval_seconds: between rounds.
        collect_seconds: between collections, the first of them one such time after the start.
    """

    def __init__(self, service: Service, *, interval_seconds: float = 5.0, collect_seconds: float = 3600.0) -> None:
        self._service = service
        self._interval_seconds = interval_seconds
        self._collect_seconds = collect_seconds
        self._next_collection = service.clock.monotonic() + collect_seconds
        self._is_first = True
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self.loop, args=(self._stop,), name="upkeep", daemon=True)

    def run_once(self, stop: threading.Event | None = None) -> None:
        """One round; StoreError where a part of it failed, which the next round tries again."""
        self._service.bucket.keep_room()
        self._service.flush_touches()
        first, self._is_first = self._is_first, False
        if not self._service.index.complete:
            if first and self._service.bucket.capabilities.exclusive:
                # A process that died left the index so, and perhaps large uploads half-written, whatever their age.
                self._service.bucket.collect_leftovers(math.inf)
            reconcile(self._service, stop)
        if self._service.clock.monotonic() >= self._next_collection:
            self._next_collection = self._service.clock.monotonic() + self._collect_seconds
            collect(self._service, stop)

    def loop(self, stop: threading.Event) -> None:
        while True:
            try:
                self.run_once(stop)
            except CacheError as error:
                _log.warning("a round of upkeep failed: %s", error)
            except Exception:
                _log.exception("a round of upkeep failed")
            if stop.wait(self._interval_seconds):
                return

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the round under way has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
