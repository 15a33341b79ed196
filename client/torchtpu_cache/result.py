"""What a caller of a node gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtpu_cache.counters import Tier
from torchtpu_cache_core.names import Digest, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An executable and where it came from.

    Args:
        key: None where the request bypassed the cache.
        tier: MEMORY, DISK, REMOTE or COMPILED.
        executable: the serialised executable, in the request's format.
        digest: of the entry that holds it; None where there is none.
        entry_bytes: size of that entry, as stored and sent.
        seconds: from asking to having it (loaded, where the caller loads).
        compile_seconds: what the compile cost, now or when the entry was made.
        bypassed: why the cache had no part in it, or None.
        loaded: what the caller's `load` gave.
    """

    key: Key | None
    tier: Tier
    executable: bytes | memoryview = field(repr=False)
    digest: Digest | None
    entry_bytes: int
    seconds: float
    compile_seconds: float
    bypassed: str | None = None
    loaded: Any = None

    @property
    def seconds_saved(self) -> float:
        """Against compiling here; negative where the cache was slower, zero for a compile."""
        return 0.0 if self.tier is Tier.COMPILED else self.compile_seconds - self.seconds
