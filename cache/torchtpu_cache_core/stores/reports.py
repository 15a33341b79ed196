"""What the disk store's housekeeping found and did."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtpu_cache_core.errors import CorruptReason
from torchtpu_cache_core.names import Key


@dataclass(frozen=True, slots=True)
class BadEntry:
    """A file that is named like an entry and is none. `set_aside` tells whether it was moved to the quarantine."""

    key: Key
    reason: CorruptReason
    detail: str
    set_aside: bool


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What a check of every entry found.

    Args:
        entries: how many are whole, payload included.
        size_bytes: of those, as stored.
        bad: what is named like an entry and is none.
        unreadable: keys whose file could not be read, with the reason for a person.
        unlistable: shards (two hex digits) whose folder could not be listed.
        foreign: names of what is not ours and stays.
        leftovers_removed: temporary files of dead writers.
    """

    entries: int = 0
    size_bytes: int = 0
    bad: list[BadEntry] = field(default_factory=list)
    unreadable: list[tuple[Key, str]] = field(default_factory=list)
    unlistable: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    leftovers_removed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a collection did.

    Args:
        entries: how many there are afterwards.
        size_bytes: what they take, as the limit counts.
        evicted: how many entries went to keep the limits.
        leftovers_removed: temporary files of dead writers.
        foreign: names of what is not ours and stays.
    """

    entries: int
    size_bytes: int
    evicted: int
    leftovers_removed: int
    foreign: tuple[str, ...]
