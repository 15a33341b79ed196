"""How much a disk store holds, per shard. Pure; `account` shares it among processes.

| offset | bytes | what (integers little-endian) |
|---|---|---|
| 0 | 8 | magic `89 54 54 43 41 0d 0a 1a` |
| 8 | 2 | version, now 2 |
| 10 | 6 | zero |
| 16 | 1024 | u32 per shard: entries |
| 1040 | 1024 | u32 per shard: reservations |
| 2064 | 1024 | u32 per shard: changes, modulo 2^32 |
| 3088 | 2048 | u64 per shard: bytes of entries and leftovers |
| 5136 | 2048 | u64 per shard: bytes reserved |
| 7184 | 2048 | f64 per shard: when it was last scanned, 0 for never |
| 9232 | 32 | SHA-256 of all bytes before |

A writer that is killed leaves its reservation behind, and other tools may delete files. So the ledger is not the truth,
but is corrected shard by shard: each put scans one shard whose last scan is old, and a put that would have to evict
scans those where room has been reserved for a while. A scan runs without a lock, and counts only if the shard's change
counter stood still meanwhile.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final, Self

from torchtpu_cache_core.stores.layout import SHARDS

RESCAN_SECONDS: Final = 3600.0
DOUBT_SECONDS: Final = 60.0
"""How long a reservation counts unseen where entries would have to go for it: its writer may have died."""

_MAGIC: Final = b"\x89TTCA\r\n\x1a"
_VERSION: Final = 2
_FORM: Final = struct.Struct(f"<8sHHI{SHARDS * 3}I{SHARDS * 2}Q{SHARDS}d")
LEDGER_BYTES: Final = _FORM.size + 32


@dataclass(frozen=True, slots=True)
class ShardScan:
    """What a scan of one shard found.

    Args:
        change: the shard's change counter as it stood before the scan.
        reservations_live: some temporary file may belong to a living writer.
    """

    shard: int
    change: int
    entries: int
    size_bytes: int
    reservations_live: bool


@dataclass(frozen=True, slots=True)
class Excess:
    """By how much the limits are passed; nothing is positive where they are kept."""

    size_bytes: int
    entries: int

    def __bool__(self) -> bool:
        return self.size_bytes > 0 or self.entries > 0


class Ledger:
    """Entries and bytes per shard, and what writers have reserved. Not thread-safe."""

    def __init__(self) -> None:
        self.entries = [0] * SHARDS
        self.reservations = [0] * SHARDS
        self.changes = [0] * SHARDS
        self.bytes = [0] * SHARDS
        self.reserved_bytes = [0] * SHARDS
        self.scanned_seconds = [0.0] * SHARDS

    def total_entries(self) -> int:
        """Entries and reservations; shards never scanned are taken to be like the others."""
        return sum(self.entries) + sum(self.reservations) + self._unseen(self.entries)

    def total_bytes(self) -> int:
        """Bytes as the limit counts them: blocks of entries, leftovers, and what is being written."""
        return sum(self.bytes) + sum(self.reserved_bytes) + self._unseen(self.bytes)

    def _unseen(self, counts: list[int]) -> int:
        unseen = self.scanned_seconds.count(0.0)
        if not unseen:
            return 0
        seen = [n for n, entries, when in zip(counts, self.entries, self.scanned_seconds, strict=True) if when]
        filled = [n for n in seen if n]
        return unseen * sum(filled) // len(filled) if filled else 0

    def excess(self, limit_bytes: int, limit_entries: int) -> Excess:
        return Excess(self.total_bytes() - limit_bytes, self.total_entries() - limit_entries)

    def reserve(self, shard: int, size_bytes: int) -> None:
        self.reservations[shard] += 1
        self.reserved_bytes[shard] += size_bytes
        self._changed(shard)

    def release(self, shard: int, size_bytes: int) -> None:
        """Ends a reservation. One that a scan has written off meanwhile is not taken off twice."""
        self.reservations[shard] = max(0, self.reservations[shard] - 1)
        self.reserved_bytes[shard] = max(0, self.reserved_bytes[shard] - size_bytes)
        self._changed(shard)

    def add(self, shard: int, size_bytes: int) -> None:
        self.entries[shard] += 1
        self.bytes[shard] += size_bytes
        self._changed(shard)

    def remove(self, shard: int, size_bytes: int) -> None:
        self.entries[shard] = max(0, self.entries[shard] - 1)
        self.bytes[shard] = max(0, self.bytes[shard] - size_bytes)
        self._changed(shard)

    def due(self, shard: int, now_seconds: float) -> list[int]:
        """The shards that a put into `shard` should scan first: that one if it never was, and the oldest other."""
        oldest_seconds = min(self.scanned_seconds)
        oldest = self.scanned_seconds.index(oldest_seconds)
        # A scan dated in the future comes from a clock that was set back.
        is_recent = now_seconds - RESCAN_SECONDS < oldest_seconds <= now_seconds + RESCAN_SECONDS
        is_due = oldest_seconds == 0.0 or not is_recent
        never = self.scanned_seconds[shard] == 0.0
        return [*([shard] if never else []), *([oldest] if is_due and oldest != shard else [])]

    def doubtful(self, shard: int, now_seconds: float) -> list[int]:
        """The shards to scan before anything is removed for a put into `shard`, which has reserved its room: those that
        never were, and those where others have reserved room for a while."""
        return [
            number
            for number in range(SHARDS)
            if self.scanned_seconds[number] == 0.0
            or (
                number != shard
                and self.reservations[number] > 0
                and abs(now_seconds - self.scanned_seconds[number]) > DOUBT_SECONDS
            )
        ]

    def accept(self, scan: ShardScan, now_seconds: float) -> bool:
        """Takes over what a scan found, unless the shard changed meanwhile."""
        shard = scan.shard
        if scan.change != self.changes[shard]:
            return False
        self.entries[shard] = scan.entries
        self.bytes[shard] = scan.size_bytes
        if not scan.reservations_live:
            self.reservations[shard] = 0
            self.reserved_bytes[shard] = 0
        self.scanned_seconds[shard] = now_seconds
        return True

    def postpone(self, shard: int, now_seconds: float) -> None:
        """Lets a shard that could not be scanned wait its turn again."""
        self.scanned_seconds[shard] = now_seconds

    def _changed(self, shard: int) -> None:
        self.changes[shard] = (self.changes[shard] + 1) % (1 << 32)

    def to_bytes(self) -> bytes:
        body = _FORM.pack(
            *(_MAGIC, _VERSION, 0, 0),
            *self.entries,
            *self.reservations,
            *self.changes,
            *self.bytes,
            *self.reserved_bytes,
            *self.scanned_seconds,
        )
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self | None:
        """Reads `to_bytes` back; None for anything else."""
        if len(raw) != LEDGER_BYTES or hashlib.sha256(raw[:-32]).digest() != raw[-32:]:
            return None
        magic, version, zero, also_zero, *numbers = _FORM.unpack_from(raw)
        if (magic, version, zero, also_zero) != (_MAGIC, _VERSION, 0, 0):
            return None
        ledger = cls()
        columns = [numbers[i * SHARDS : (i + 1) * SHARDS] for i in range(6)]
        ledger.entries, ledger.reservations, ledger.changes = columns[:3]
        ledger.bytes, ledger.reserved_bytes, ledger.scanned_seconds = columns[3:]
        return ledger
