"""The ledger of a namespace, shared among processes through a small locked file.

The lock is held for a read, a little arithmetic and a write, never while entries are read or written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from torchtpu_cache_core.errors import StoreUnavailable
from torchtpu_cache_core.stores.failures import has_no_locks, translated
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.ledger import LEDGER_BYTES, Ledger

LOCK_SECONDS: Final = 2.0
"""How long a stopped process that holds the lock may keep the others waiting, before their puts fail."""

IMPATIENT_LOCK_SECONDS: Final = 0.02
IMPATIENT_SECONDS: Final = 60.0
"""How long waits are short after one was in vain, so that a stopped process costs a job no two seconds per program."""

_WAITS: Final = 1000


class Account:
    """Gives the ledger out, under the lock. Thread-safe.

    Args:
        path: the file; its folder must exist for a change.
        fresh: makes the ledger where there is none, or none that can be read.
    """

    def __init__(self, path: Path, files: Files, fresh: Callable[[], Ledger]) -> None:
        self._path = path
        self._files = files
        self._fresh = fresh
        self._impatient_until = -math.inf  # on the monotonic clock; a race here costs one longer wait
        self.waits_seconds: deque[float] = deque(maxlen=_WAITS)
        """How long this process waited for the lock, the last times; appending is atomic."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[Ledger]:
        """The ledger, to be changed; written back at the end of the block, and not where the block raises.

        Raises:
            StoreUnavailable: somebody held the lock for too long.
            StoreError: the file cannot be read or written.
        """
        with translated("the account of the disk store could not be changed"):
            fd = self._files.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                self._lock(fd)
                ledger = self._load(fd)
                yield ledger
                raw = ledger.to_bytes()
                # Cut short by a full disk, it no longer fits its digest, and the next one begins afresh.
                self._files.pwrite(fd, raw, 0)
                if self._files.fstat(fd).st_size > len(raw):
                    self._files.truncate(fd, len(raw))
            finally:
                self._files.let_go(fd)

    def snapshot(self) -> Ledger:
        """The ledger as it stands, without a lock and without making a file: a torn read gives a fresh one.

        Raises:
            StoreError: the file is there and cannot be read.
        """
        with translated("the account of the disk store could not be read"):
            try:
                fd = self._files.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return self._fresh()
            try:
                return self._load(fd)
            finally:
                self._files.close(fd)

    def _load(self, fd: int) -> Ledger:
        if not stat.S_ISREG(self._files.fstat(fd).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        raw = self._files.read(fd, LEDGER_BYTES + 1)
        return Ledger.from_bytes(raw) or self._fresh()

    def _lock(self, fd: int) -> None:
        began = time.monotonic()
        pause_seconds = 0.0002
        while True:
            try:
                self._files.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited > (IMPATIENT_LOCK_SECONDS if began < self._impatient_until else LOCK_SECONDS):
                    self._impatient_until = time.monotonic() + IMPATIENT_SECONDS
                    raise StoreUnavailable("another process holds the disk store's account for too long") from None
                time.sleep(pause_seconds)
                pause_seconds = min(0.005, pause_seconds * 2)
            except OSError as error:
                # Without locks two writers may lose each other's numbers; the next scans correct them.
                if has_no_locks(error):
                    break
                raise
        self._impatient_until = -math.inf
        self.waits_seconds.append(time.monotonic() - began)
