"""What size of entry a remote takes, as far as its refusals have told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import EntryTooLarge

_REFUSAL_SECONDS: Final = 3600.0
_BREAK_SECONDS: Final = 600.0
_BREAKS: Final = 2
_SUSPECT_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class _Refusal:
    most_bytes: int
    named_bytes: int | None
    until_seconds: float


@dataclass(frozen=True, slots=True)
class _Breaks:
    count: int
    least_bytes: int


class SizeLimit:
    """Remembers refusals, so that a large entry is sent once; for an hour, since an operator may raise a limit.

    Some proxies name no limit but cut the connection. One such break may be chance; after two, with no upload of that
    size acknowledged in between, the size counts as too large for ten minutes.

    Thread-safe without a lock, which a fork could leave taken in the child: each state is replaced as a whole, and a
    change that is lost to another thread costs one upload.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusal: _Refusal | None = None
        self._breaks: _Breaks | None = None

    def check(self, size_bytes: int) -> None:
        """Raises EntryTooLarge for a size that the remote would refuse."""
        refusal = self._standing()
        if refusal is not None and size_bytes > refusal.most_bytes:
            raise EntryTooLarge(size_bytes, refusal.named_bytes)

    def refused(self, size_bytes: int, limit_bytes: int | None) -> None:
        """The remote called this size too large, and may have named its limit."""
        most = size_bytes - 1 if limit_bytes is None else min(limit_bytes, size_bytes - 1)
        self._remember(most, limit_bytes, _REFUSAL_SECONDS)

    def broke_off(self, size_bytes: int) -> None:
        """The connection broke while an entry of this size was sent."""
        if size_bytes < _SUSPECT_BYTES:
            return
        before = self._breaks
        breaks = (
            _Breaks(1, size_bytes) if before is None else _Breaks(before.count + 1, min(before.least_bytes, size_bytes))
        )
        if breaks.count < _BREAKS:
            self._breaks = breaks
        else:
            self._breaks = None
            self._remember(breaks.least_bytes - 1, None, _BREAK_SECONDS)

    def accepted(self, size_bytes: int) -> None:
        """The remote acknowledged an entry of this size."""
        breaks = self._breaks
        if breaks is not None and size_bytes >= breaks.least_bytes:
            self._breaks = None

    def _standing(self) -> _Refusal | None:
        refusal = self._refusal
        return None if refusal is None or self._clock.monotonic() >= refusal.until_seconds else refusal

    def _remember(self, most_bytes: int, named_bytes: int | None, seconds: float) -> None:
        standing = self._standing()
        if standing is None or most_bytes <= standing.most_bytes:
            self._refusal = _Refusal(most_bytes, named_bytes, self._clock.monotonic() + seconds)
