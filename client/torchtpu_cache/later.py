"""Writes of cheap programs to the disk tier, later and slowly, so that they never cost more than compiling again.

A job may compile thousands of programs in a millisecond each. Writing each while the caller waits would make the
cache slower than none, and four such jobs on two cores would fight for the disk. So one thread per process writes
them for a tenth of its time at most; what does not fit into a short queue is not written, which costs a later
process one millisecond. Everything that took longer to compile is written at once, by its caller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Final

from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import StoreError
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.store import Store

_log = logging.getLogger(__name__)

_MAX_ENTRIES: Final = 1024
_MAX_BYTES: Final = 32 << 20
_REST_PER_WORK: Final = 9.0
_CLOSE_SECONDS: Final = 1.0


class LaterWriter:
    """Puts entries into `store` in the background; thread-safe. Failures are counted, and cost nothing else."""

    def __init__(self, store: Store, counters: Counters) -> None:
        self._store = store
        self._counters = counters
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[tuple[Entry, Attestation | None]] = deque()
        self._queued_bytes = 0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def add(self, entry: Entry, attestation: Attestation | None) -> None:
        """Takes an entry to write, unless too much waits already."""
        with self._changed:
            full = len(self._queue) >= _MAX_ENTRIES or self._queued_bytes + entry.size_bytes > _MAX_BYTES
            if full or self._closing.is_set():
                self._counters.skipped(Tier.DISK, "busy")
                return
            self._queue.append((entry, attestation))
            self._queued_bytes += entry.size_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="torchtpu-cache-later", daemon=True)
                self._thread.start()
            elif len(self._queue) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Writes what waits, for at most a second, and ends."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_SECONDS)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing.is_set():
                    self._changed.wait()
                if not self._queue:
                    return
                entry, attestation = self._queue.popleft()
                self._queued_bytes -= entry.size_bytes
            started = time.monotonic()
            self._write(entry, attestation)
            self._closing.wait(_REST_PER_WORK * (time.monotonic() - started))

    def _write(self, entry: Entry, attestation: Attestation | None) -> None:
        try:
            self._store.put(entry, attestation)
        except StoreError as error:
            self._counters.failure(Tier.DISK, error.kind)
        except Exception:
            _log.exception("a cheap entry could not be written")
            self._counters.failure(Tier.DISK, "internal")
