"""What size of entry a remote takes, as far as its refusals have told."""

from __future__ import annotations

import threading
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import EntryTooLarge

_REFUSAL_SECONDS: Final = 3600.0
_BREAK_SECONDS: Final = 600.0
_BREAKS: Final = 2
_SUSPECT_BYTES: Final = 256 << 10


class SizeLimit:
    """Remembers refusals, so that a large entry is sent once; for an hour, since an operator may raise a limit.

    Some proxies name no limit but cut the connection. One such break may be chance; after two, with no upload of that
    size acknowledged in between, the size counts as too large for ten minutes. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards all below; held for no I/O
        self._most_bytes: int | None = None
        self._named_bytes: int | None = None
        self._until = 0.0
        self._breaks = 0
        self._broken_bytes = 0

    def check(self, size_bytes: int) -> None:
        """Raises EntryTooLarge for a size that the remote would refuse."""
        with self._lock:
            if self._most_bytes is not None and self._clock.monotonic() >= self._until:
                self._most_bytes = self._named_bytes = None
            if self._most_bytes is not None and size_bytes > self._most_bytes:
                raise EntryTooLarge(size_bytes, self._named_bytes)

    def refused(self, size_bytes: int, limit_bytes: int | None) -> None:
        """The remote called this size too large, and may have named its limit."""
        most = size_bytes - 1 if limit_bytes is None else min(limit_bytes, size_bytes - 1)
        self._remember(most, limit_bytes, _REFUSAL_SECONDS)

    def broke_off(self, size_bytes: int) -> None:
        """The connection broke while an entry of this size was sent."""
        if size_bytes < _SUSPECT_BYTES:
            return
        with self._lock:
            self._breaks += 1
            self._broken_bytes = size_bytes if self._breaks == 1 else min(self._broken_bytes, size_bytes)
            if self._breaks < _BREAKS:
                return
            self._breaks = 0
            broken = self._broken_bytes
        self._remember(broken - 1, None, _BREAK_SECONDS)

    def accepted(self, size_bytes: int) -> None:
        """The remote acknowledged an entry of this size."""
        with self._lock:
            if self._breaks and size_bytes >= self._broken_bytes:
                self._breaks = 0

    def _remember(self, most_bytes: int, named_bytes: int | None, seconds: float) -> None:
        with self._lock:
            if self._most_bytes is None or most_bytes < self._most_bytes:
                self._most_bytes, self._named_bytes = most_bytes, named_bytes
            self._until = self._clock.monotonic() + seconds
