"""Locks by name: work on one name never delays another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator


class NamedLocks:
    """One lock per name, kept only while somebody holds or wants it. Not reentrant."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards _locks, for moments only
        self._locks: dict[Hashable, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def hold(self, name: Hashable) -> Iterator[None]:
        with self._guard:
            lock, users = self._locks.get(name, (None, 0))
            lock = lock or threading.Lock()
            self._locks[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks[name]
                if users == 1:
                    del self._locks[name]
                else:
                    self._locks[name] = (lock, users - 1)
