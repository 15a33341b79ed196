"""How the disk store counts, keeps its limits and comes back from lost counts."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from support.disk_bench import Bench
from torchtpu_cache_core.errors import StoreFull
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.stores.layout import shard_of, temp_name
from torchtpu_cache_core.testing.entries import entry_for, key_for
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles

_ENTRY = entry_for("the entry")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "root")


# ---- the account -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["absent", "empty", "garbage", "longer"])
def test_a_lost_account_comes_back(bench: Bench, damage: str) -> None:
    store = bench.open()
    for i in range(40):
        store.put(entry_for(f"kept {i}"))
    before = store.stats()
    account = bench.layout.account
    match damage:
        case "absent":
            account.unlink()
        case "empty":
            account.write_bytes(b"")
        case "garbage":
            account.write_bytes(os.urandom(account.stat().st_size))
        case "longer":
            account.write_bytes(account.read_bytes() + b"x")
    assert store.put(entry_for("one more")).status is PutStatus.CREATED
    store.gc()
    assert store.stats().entries == before.entries + 1
    assert store.stats().size_bytes == before.size_bytes + before.size_bytes // before.entries


def test_puts_alone_bring_a_lost_account_back(bench: Bench) -> None:
    store = bench.open()
    for i in range(300):
        store.put(entry_for(f"kept {i}", compile_seconds=0.0))
    bench.layout.account.unlink()
    for i in range(256):
        store.put(entry_for(f"more {i}", compile_seconds=0.0))
    assert store.stats().entries == 556
    assert store.stats() == (store.gc(), store.stats())[1]


def test_a_lost_account_does_not_lose_the_limit(bench: Bench) -> None:
    store = bench.open(limit_entries=200)
    for i in range(200):
        store.put(entry_for(f"kept {i}", compile_seconds=0.0))
    bench.layout.account.unlink()
    for i in range(300):
        store.put(entry_for(f"more {i}", compile_seconds=0.0))
    assert len(list(store.iterate())) <= 200


def test_a_lost_account_costs_no_entry_while_there_is_room(bench: Bench) -> None:
    """Some shards hold many times what others do; an estimate from those would empty the store."""
    store = bench.open(limit_entries=100)
    entries = [entry_for(f"kept {i}") for i in range(3000)]
    first = min(shard_of(entry.key) for entry in entries)
    crowded = [entry for entry in entries if shard_of(entry.key) == first]
    kept = [*crowded, *[entry for entry in entries if entry not in crowded][:60]]
    for entry in kept:
        store.put(entry)
    bench.layout.account.unlink()
    assert store.put(entry_for("one more")).status is PutStatus.CREATED
    assert store.stats().entries == len(kept) + 1
    assert all(store.contains(entry.key) for entry in kept)


def test_deletes_by_others_are_noticed(bench: Bench) -> None:
    store = bench.open()
    entries = [entry_for(f"kept {i}") for i in range(10)]
    for entry in entries:
        store.put(entry)
    for entry in entries[:5]:
        bench.path(entry.key).unlink()
    assert store.gc().entries == 5
    assert store.stats().entries == 5


def test_reservations_of_the_dead_are_written_off(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    before = store.stats()
    with store._writer.room._account.changing() as ledger:  # what a writer leaves that is killed after it reserved
        ledger.reserve(shard_of(_ENTRY.key), 1 << 20)
    assert store.stats().size_bytes == before.size_bytes + (1 << 20)
    store.gc()
    assert store.stats() == before


def test_no_entry_goes_for_what_the_dead_had_reserved(bench: Bench) -> None:
    """A job that is killed in its puts again and again would else empty the store within the hour."""
    store = bench.open(limit_entries=20)
    kept = [entry_for(f"kept {i}", compile_seconds=0.0) for i in range(15)]
    for entry in kept:
        store.put(entry)
    for shard in range(0, 256, 10):
        with store._writer.room._account.changing() as ledger:
            ledger.reserve(shard, 1 << 20)
    bench.clock.advance(90)
    assert store.put(_ENTRY).status is PutStatus.CREATED
    assert all(store.contains(entry.key) for entry in kept)


def test_room_that_the_living_have_reserved_is_theirs(bench: Bench) -> None:
    store = bench.open(limit_entries=20)
    for i in range(19):
        store.put(entry_for(f"kept {i}", compile_seconds=0.0))
    shard = (shard_of(_ENTRY.key) + 1) % 256
    living = bench.layout.shard_dir(shard) / temp_name()
    living.parent.mkdir(mode=0o700, exist_ok=True)
    with living.open("wb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        with store._writer.room._account.changing() as ledger:
            ledger.reserve(shard, 4096)
        bench.clock.advance(90)
        store.put(_ENTRY)
        assert len(list(store.iterate())) == 18, "one for the new, one for the slack"


def test_a_folder_that_cannot_be_listed_stops_no_put(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    bench.clock.advance(7200)
    denied = Fault(call="listdir", error=errno.EACCES, within=f"/{shard_of(_ENTRY.key):02x}")
    with bench.files.failing(denied):
        for i in range(300):
            store.put(entry_for(f"other {i}", compile_seconds=0.0))
    assert bench.files.hits["listdir"] == 1


# ---- room ------------------------------------------------------------------------------------------------------------


def test_the_dear_and_the_used_stay(bench: Bench) -> None:
    store = bench.open(limit_entries=6)
    store.put(entry_for("dear", compile_seconds=0.05))
    store.put(entry_for("used", compile_seconds=0.005))
    for i in range(25):
        bench.clock.advance(90)
        store.put(entry_for(f"cheap {i}", compile_seconds=0.005))
        assert store.get(key_for("used")) is not None
    assert store.contains(key_for("dear"))
    for i in range(200):
        bench.clock.advance(600)
        store.put(entry_for(f"later {i}", compile_seconds=0.005))
    assert not store.contains(key_for("dear")), "what nobody uses must go at last, however dear it was"


def test_a_large_store_drops_its_cheap_entries_and_not_a_sample_of_all(bench: Bench) -> None:
    """A twentieth of the limit is more than a sample holds, and what a put needs is one entry."""
    store = bench.open(limit_entries=3000)
    dear = [entry_for(f"dear {i}", compile_seconds=0.009) for i in range(2250)]
    cheap = [entry_for(f"cheap {i}", compile_seconds=0.001) for i in range(750)]
    for entry in (*dear, *cheap):
        store.put(entry)
    for i in range(4):
        bench.clock.advance(90)
        store.put(entry_for(f"new {i}", compile_seconds=0.009))
    kept = {info.key for info in store.iterate()}
    assert {entry.key for entry in dear} <= kept
    assert 2800 < len(kept) < 3000


def test_eviction_work_is_bounded(bench: Bench) -> None:
    store = bench.open(limit_entries=300)
    for i in range(300):
        store.put(entry_for(f"filling {i}", compile_seconds=0.0))
    most = 0
    for i in range(60):
        bench.files.calls.clear()
        store.put(entry_for(f"further {i}", compile_seconds=0.0))
        most = max(most, len(bench.files.calls))
    assert most < 64 * 5 + 3 * 256, most  # one sample's headers, and listings until it is full


def test_a_disk_that_others_fill_is_left_to_them(bench: Bench) -> None:
    store = bench.open(min_free_bytes=1 << 62)
    with pytest.raises(StoreFull, match="stay free"):
        store.put(_ENTRY)
    assert store.stats().size_bytes == 0
    assert bench.open().put(_ENTRY).status is PutStatus.CREATED
    with pytest.raises(StoreFull):
        store.put(entry_for("another"))
    assert store.contains(_ENTRY.key), "evicting everything would have helped nobody"


def test_the_free_space_guard_evicts_where_that_helps(bench: Bench) -> None:
    store = bench.open()
    for i in range(20):
        store.put(entry_for(f"earlier {i}"))
    space = os.statvfs(bench.root)
    free_bytes = space.f_bavail * space.f_frsize

    class Shrinking(FaultyFiles):
        """A file system whose free space is what these entries leave of a fixed amount."""

        def statvfs(self, path: Path) -> os.statvfs_result:
            used = 4096 * sum(1 for p in (path / "entries").rglob("ttc1-*"))
            real = list(os.statvfs(path))
            real[1], real[4] = 4096, (100_000 - used) // 4096
            return os.statvfs_result(real)

    assert free_bytes > 100_000
    bench.files = Shrinking()
    guarded = bench.open(min_free_bytes=40_000)
    assert guarded.put(_ENTRY).status is PutStatus.CREATED
    assert guarded.stats().entries < 20
