"""The ledger: arithmetic, bytes, and a random history against plain counting."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.stores.layout import SHARDS
from torchtpu_cache_core.stores.ledger import LEDGER_BYTES, RESCAN_SECONDS, Ledger, ShardScan


def _ledger() -> Ledger:
    ledger = Ledger()
    ledger.scanned_seconds = [1.0] * SHARDS
    return ledger


def test_a_fresh_one_counts_nothing_and_wants_scans() -> None:
    ledger = Ledger()
    assert (ledger.total_bytes(), ledger.total_entries()) == (0, 0)
    assert ledger.due(7, 100.0) == [7, 0]
    assert ledger.due(0, 100.0) == [0]


def test_bytes_come_back() -> None:
    ledger = _ledger()
    ledger.reserve(3, 4096)
    ledger.add(255, 1 << 40)
    raw = ledger.to_bytes()
    assert len(raw) == LEDGER_BYTES
    again = Ledger.from_bytes(raw)
    assert again is not None
    assert again.to_bytes() == raw
    assert again.total_bytes() == 4096 + (1 << 40)
    assert again.total_entries() == 2


@given(st.binary(max_size=200), st.integers(0, LEDGER_BYTES - 1))
def test_other_bytes_are_no_ledger(data: bytes, at: int) -> None:
    raw = bytearray(_ledger().to_bytes())
    assert Ledger.from_bytes(data) is None
    raw[at] ^= 1
    assert Ledger.from_bytes(bytes(raw)) is None


def test_a_scan_counts_only_if_nothing_changed_meanwhile() -> None:
    ledger = _ledger()
    ledger.add(5, 100)
    scan = ShardScan(5, ledger.changes[5], 7, 700, False)
    ledger.add(5, 100)
    assert not ledger.accept(scan, 50.0)
    assert ledger.entries[5] == 2
    assert ledger.accept(ShardScan(5, ledger.changes[5], 7, 700, False), 50.0)
    assert (ledger.entries[5], ledger.bytes[5], ledger.scanned_seconds[5]) == (7, 700, 50.0)


def test_a_scan_writes_off_dead_reservations_only() -> None:
    ledger = _ledger()
    ledger.reserve(5, 100)
    ledger.accept(ShardScan(5, ledger.changes[5], 0, 0, True), 50.0)
    assert ledger.total_bytes() == 100
    ledger.accept(ShardScan(5, ledger.changes[5], 0, 0, False), 50.0)
    assert ledger.total_bytes() == 0
    ledger.release(5, 100)  # the writer lives after all
    assert (ledger.total_bytes(), ledger.total_entries()) == (0, 0)


def test_one_old_shard_is_due_at_a_time() -> None:
    ledger = _ledger()
    assert ledger.due(3, 100.0) == []
    now = RESCAN_SECONDS + 10
    ledger.scanned_seconds[9] = 0.5
    assert ledger.due(3, now) == [9]
    ledger.postpone(9, now)
    assert ledger.due(3, now) == [0]


def test_clocks_that_were_set_back_do_not_stop_scans() -> None:
    ledger = Ledger()
    ledger.scanned_seconds = [1e9] * SHARDS
    assert ledger.due(3, 1000.0) == [0]


def test_unseen_shards_are_taken_to_be_like_the_others() -> None:
    ledger = Ledger()
    for shard in range(64):
        ledger.scanned_seconds[shard] = 1.0
        ledger.add(shard, 1000)
    assert ledger.total_entries() == 256
    assert ledger.total_bytes() == 256_000


def test_a_random_history_adds_up() -> None:
    chance = random.Random(4)
    ledger, entries, reserved = _ledger(), [], []
    for _ in range(3000):
        shard, size = chance.randrange(SHARDS), chance.randrange(1, 1 << 30)
        match chance.randrange(3):
            case 0:
                ledger.reserve(shard, size)
                reserved.append((shard, size))
            case 1 if reserved:
                shard, size = reserved.pop(chance.randrange(len(reserved)))
                ledger.release(shard, size)
                ledger.add(shard, size)
                entries.append((shard, size))
            case 2 if entries:
                ledger.remove(*entries.pop(chance.randrange(len(entries))))
        assert ledger.total_entries() == len(entries) + len(reserved)
        assert ledger.total_bytes() == sum(size for _, size in entries + reserved)
    excess = ledger.excess(0, 10**9)
    assert excess
    assert excess.size_bytes == ledger.total_bytes()
    assert not ledger.excess(1 << 62, 10**9)
