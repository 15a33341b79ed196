"""What the memory store does beside the contract."""

from __future__ import annotations

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for, key_for


def test_the_least_recently_used_goes_first() -> None:
    store = MemoryStore(limit_bytes=1 << 30, limit_entries=3)
    for name in "abc":
        store.put(entry_for(name))
    store.get(key_for("a"))
    store.contains(key_for("b"))  # no use
    store.put(entry_for("c"))  # a put of what is there is no use either
    store.put(entry_for("d"))
    assert [store.contains(key_for(name)) for name in "abcd"] == [True, False, True, True]


def test_the_limit_counts_unpacked_bytes_too() -> None:
    packed = entry_for("packs well", executable=b"".join(b"word %d; " % i for i in range(20_000)))
    assert packed.size_bytes < packed.header.executable_bytes / 2
    store = MemoryStore(limit_bytes=packed.size_bytes + packed.header.executable_bytes)
    assert store.put(packed).status is PutStatus.CREATED
    assert store.stats().size_bytes == store.stats().limit_bytes
    store.put(entry_for("another"))
    assert not store.contains(packed.key)


def test_an_entry_is_unpacked_once_for_all_readers() -> None:
    store = MemoryStore(limit_bytes=1 << 30)
    packed = entry_for("packs well", executable=b"".join(b"word %d; " % i for i in range(20_000)))
    store.put(Entry.parse(bytes(packed.buffer)))
    first, second = store.get(packed.key), store.get(packed.key)
    assert first is not None
    assert second is not None
    assert first.entry.executable() is second.entry.executable()


def test_a_listing_shows_the_last_use() -> None:
    clock = ManualClock(1000.0)
    store = MemoryStore(limit_bytes=1 << 30, clock=clock)
    store.put(entry_for("used"))
    clock.advance(5)
    assert [info.accessed_seconds for info in store.iterate()] == [1000.0]
    store.get(key_for("used"))
    assert [info.accessed_seconds for info in store.iterate()] == [1005.0]


def test_closing_lets_everything_go() -> None:
    store = MemoryStore(limit_bytes=1 << 30)
    store.put(entry_for("held"))
    store.close()
    assert (store.stats().entries, store.stats().size_bytes) == (0, 0)
