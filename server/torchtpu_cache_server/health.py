"""Whether the service is fit to serve: by proof, and by what its own requests met lately."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import CacheError

LOG_SECONDS: Final = 5.0
"""A dying disk fails every request; the counter has them all, the log one in this time."""


class Health:
    """Thread-safe.

    Args:
        probe: proves that storage works, or raises.
        fresh_seconds: how long a proof stands, so that asking often costs nothing.
        steady: this many failures in a row make the service unfit, whatever the proof says.
        memory_seconds: a failure older than that no longer counts: nobody may be asking any more.
    """

    def __init__(
        self,
        probe: Callable[[], None],
        clock: Clock,
        *,
        fresh_seconds: float = 1.0,
        steady: int = 5,
        memory_seconds: float = 30.0,
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._fresh_seconds = fresh_seconds
        self._steady = steady
        self._memory_seconds = memory_seconds
        self._lock = threading.Lock()  # guards all below
        self._failures = 0
        self._failed_at = 0.0
        self._logged_at = 0.0
        self._proved_at: float | None = None
        self._proof: str | None = None

    def succeeded(self) -> None:
        """A request used the storage without a failure."""
        if self._failures:
            with self._lock:
                self._failures = 0

    def failed(self) -> bool:
        """A request failed through no fault of its client; True if that is worth a line in the log by now."""
        with self._lock:
            now = self._clock.monotonic()
            is_news = self._failures == 0 or now - self._logged_at >= LOG_SECONDS
            if is_news:
                self._logged_at = now
            self._failures += 1
            self._failed_at = now
        return is_news

    def reason(self) -> str | None:
        """Why the service is unfit, or None. May block on the disk."""
        now = self._clock.monotonic()
        with self._lock:
            steady = self._failures >= self._steady and now - self._failed_at < self._memory_seconds
            proof_stands = self._proved_at is not None and now - self._proved_at < self._fresh_seconds
            proof = self._proof
        if steady:
            return "one request after another fails in the service's storage"
        if not proof_stands:
            proof = self._prove()
            with self._lock:
                self._proved_at, self._proof = self._clock.monotonic(), proof
        return proof

    def _prove(self) -> str | None:
        try:
            self._probe()
        except CacheError as error:
            return str(error)
        return None
