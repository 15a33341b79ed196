"""What a caller of a node gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtpu_cache.counters import Tier
from torchtpu_cache_core.names import Digest, Key


class Packed(Protocol):
    """The entry that an executable is stored as, or becomes."""

    @property
    def digest(self) -> Digest | None:
        """None where it cannot be packed."""
        ...

    @property
    def size_bytes(self) -> int:
        """As stored and sent; 0 where it cannot be packed."""
        ...


@dataclass(frozen=True, slots=True)
class Stamp:
    """What is kept of an entry: a `Packed`."""

    digest: Digest
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An executable and where it came from.

    Args:
        key: None where the request bypassed the cache.
        tier: MEMORY, DISK, REMOTE or COMPILED.
        executable: the serialised executable, in the request's format.
        packed: the entry that holds it, or will; None where there is none.
        seconds: from asking to having it (loaded, where the caller loads).
        compile_seconds: what the compile cost, now or when the entry was made.
        bypassed: why the cache had no part in it, or None.
        loaded: what the caller's `load` gave.
    """

    key: Key | None
    tier: Tier
    executable: bytes | memoryview = field(repr=False)
    packed: Packed | None = field(repr=False)
    seconds: float
    compile_seconds: float
    bypassed: str | None = None
    loaded: Any = None

    @property
    def digest(self) -> Digest | None:
        """Of the entry that holds it; None where there is none.

        What was compiled just now is packed in the background: who asks before that packs it here, about 2 ms per MB.
        """
        return None if self.packed is None else self.packed.digest

    @property
    def entry_bytes(self) -> int:
        """Size of that entry, as stored and sent; packs it as `digest` does."""
        return 0 if self.packed is None else self.packed.size_bytes

    @property
    def seconds_saved(self) -> float:
        """Against compiling here; negative where the cache was slower, zero for a compile."""
        return 0.0 if self.tier is Tier.COMPILED else self.compile_seconds - self.seconds
