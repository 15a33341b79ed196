"""The contract suite: every store of entries passes it.

A test class per store, about ten lines:

    class TestDisk(StoreSuite):
        def open_store(self, place, clock, limits):
            return DiskStore(place, DEFAULT_NAMESPACE, limit_bytes=limits.bytes, ..., clock=clock)

        def raw_read(self, place, key): ...      # past the store, so that a bug in get can't hide one in put
        def raw_write(self, place, key, data): ...
        def raw_names(self, place): ...

Further hooks (`store_hooks`) are optional; a test that needs one that is not there, or a capability that the store does
not declare, is skipped with a reason that begins with "capability:". docs/add-a-store.md tells the rest. pytest and
hypothesis are imported here, in `store_hooks` and in `store_model`, and nowhere else in the package.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, EntryTooLarge, FailureKind, StoreError
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key
from torchtpu_cache_core.store import PutStatus, Store
from torchtpu_cache_core.stores.listing import target_name
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import Corruption, corruptions, entry_for, key_for, rival_of
from torchtpu_cache_core.testing.store_hooks import Limits, StoreHooks, deletes, entry_in, lacks
from torchtpu_cache_core.testing.store_model import run_model
from torchtpu_cache_core.testing.unpickling import no_unpickling
from torchtpu_cache_core.testing.worker import Job

__all__ = ["MACHINE_KEY", "Limits", "StoreSuite"]

_VICTIM: Final = entry_for("victim")
_CORRUPTIONS: Final = list(corruptions(_VICTIM))
MACHINE_KEY: Final = bytes(range(32))


class StoreSuite(StoreHooks):
    """Hold a store to the contract in `torchtpu_cache_core.store`."""

    # ---- misses, hits, conflicts -----------------------------------------------------------------------------

    def test_an_empty_store_misses(self, store: Store) -> None:
        assert store.get(_VICTIM.key) is None
        assert not store.contains(_VICTIM.key)
        assert not deletes(store) or store.delete(_VICTIM.key) is False
        assert not store.capabilities.iterates or list(store.iterate()) == []
        assert store.stats().entries == 0

    @pytest.mark.parametrize("size_bytes", [0, 1, 2000, 3 << 20])
    def test_what_was_put_comes_back(self, store: Store, size_bytes: int) -> None:
        entry = entry_for("round trip", size_bytes=size_bytes)
        outcome = store.put(entry)
        assert (outcome.status, outcome.digest) == (PutStatus.CREATED, entry.digest)
        assert store.contains(entry.key)
        got = entry_in(store, entry.key)
        assert bytes(got.buffer) == bytes(entry.buffer)
        assert (got.digest, got.header) == (entry.digest, entry.header)
        assert bytes(got.executable()) == bytes(entry.executable())

    def test_what_compresses_comes_back(self, store: Store) -> None:
        executable = b"".join(b"%d of the same again and again; " % i for i in range(4000))
        entry = entry_for("compresses", executable=executable)
        assert entry.header.codec == "zstd"
        store.put(entry)
        assert bytes(entry_in(store, entry.key).executable()) == executable

    def test_put_writes_the_entry_as_it_is(self, store: Store, place: Path) -> None:
        assert self.raw_read(place, _VICTIM.key) is None
        store.put(_VICTIM)
        raw = self.raw_read(place, _VICTIM.key)
        assert raw is not None
        assert raw[: _VICTIM.size_bytes] == bytes(_VICTIM.buffer)

    def test_get_reads_the_medium(self, store: Store, place: Path) -> None:
        self.raw_write(place, _VICTIM.key, bytes(_VICTIM.buffer))
        assert entry_in(store, _VICTIM.key).digest == _VICTIM.digest

    def test_the_same_again_is_harmless(self, store: Store) -> None:
        store.put(_VICTIM)
        outcome = store.put(entry_for("victim"))
        assert (outcome.status, outcome.digest) == (PutStatus.SAME, _VICTIM.digest)

    def test_the_first_entry_of_a_key_wins(self, store: Store) -> None:
        store.put(_VICTIM)
        outcome = store.put(rival_of(_VICTIM))
        assert (outcome.status, outcome.digest) == (PutStatus.CONFLICT, _VICTIM.digest)
        assert entry_in(store, _VICTIM.key).digest == _VICTIM.digest

    def test_a_key_that_was_set_aside_is_free(self, store: Store) -> None:
        if not deletes(store):
            lacks("deletes")
        store.put(_VICTIM)
        assert store.set_aside(_VICTIM.key, CorruptReason.PAYLOAD) is True
        assert store.get(_VICTIM.key) is None
        assert store.put(_VICTIM).status is PutStatus.CREATED
        store.delete(_VICTIM.key)
        assert store.set_aside(_VICTIM.key, CorruptReason.PAYLOAD) is False

    def test_a_deleted_key_is_free(self, store: Store) -> None:
        if not deletes(store):
            lacks("deletes")
        store.put(_VICTIM)
        assert store.delete(_VICTIM.key) is True
        assert store.get(_VICTIM.key) is None
        assert not store.contains(_VICTIM.key)
        assert store.delete(_VICTIM.key) is False
        rival = rival_of(_VICTIM)
        assert store.put(rival).status is PutStatus.CREATED
        assert entry_in(store, rival.key).digest == rival.digest

    def test_attestations_come_back(self, store: Store) -> None:
        if not store.capabilities.keeps_attestation:
            lacks("keeps_attestation")
        attestation = Attestation.by_machine(MACHINE_KEY, DEFAULT_NAMESPACE, _VICTIM)
        assert store.put(_VICTIM, attestation).attestation == attestation
        stored = store.get(_VICTIM.key)
        assert stored is not None
        assert stored.attestation == attestation
        assert store.put(rival_of(_VICTIM)).attestation == attestation
        bare = entry_for("without attestation")
        store.put(bare)
        stored = store.get(bare.key)
        assert stored is not None
        assert stored.attestation is None

    # ---- buffers ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("compresses", [False, True])
    def test_a_buffer_may_be_reused_after_put(self, store: Store, compresses: bool) -> None:
        original = entry_for("aliased", executable=bytes(5000) if compresses else None)
        buffer = bytearray(original.buffer)
        store.put(Entry.parse(memoryview(buffer)))
        buffer[:] = bytes(len(buffer))
        got = entry_in(store, original.key)
        assert bytes(got.buffer) == bytes(original.buffer)
        assert bytes(got.executable()) == bytes(original.executable())

    def test_what_get_gave_outlives_the_entry(self, store: Store) -> None:
        if not deletes(store):
            lacks("deletes")
        original = entry_for("outlived", size_bytes=1 << 20)
        store.put(original)
        got = entry_in(store, original.key)
        store.delete(original.key)
        store.put(rival_of(original))
        assert bytes(got.buffer) == bytes(original.buffer)
        with pytest.raises(TypeError, match=r"read-only|cannot modify"):
            got.buffer[0] = 0

    # ---- listing and counting --------------------------------------------------------------------------------

    def test_iterate_shows_what_the_headers_say(self, store: Store, clock: ManualClock) -> None:
        if not store.capabilities.iterates:
            lacks("iterates")
        entries = {e.key: e for e in (entry_for(f"listed {i}", compile_seconds=i + 0.5) for i in range(5))}
        for entry in entries.values():
            store.put(entry)
        listed = list(store.iterate())
        assert sorted(info.key for info in listed) == sorted(entries)
        for info in listed:
            header = entries[info.key].header
            assert info.size_bytes >= entries[info.key].size_bytes
            assert info.executable_bytes == header.executable_bytes
            assert info.compile_seconds == header.compile_seconds
            assert info.created_seconds == pytest.approx(header.created_seconds)
            assert info.accessed_seconds == pytest.approx(clock.time(), abs=61)
            assert info.target_name == target_name(header.components)
            assert not info.pinned

    def test_stats_count_entries(self, store: Store) -> None:
        for i in range(4):
            store.put(entry_for(f"counted {i}"))
        stats = store.stats()
        assert stats.entries == 4
        assert stats.size_bytes >= 4 * 2000
        if deletes(store):
            store.delete(key_for("counted 0"))
            assert store.stats().entries == 3
            assert store.stats().size_bytes < stats.size_bytes

    # ---- lives -----------------------------------------------------------------------------------------------

    def test_durable_entries_outlive_the_store_object(self, place: Path, clock: ManualClock) -> None:
        with self.open_store(place, clock, Limits()) as store:
            if not store.capabilities.durable:
                lacks("durable")
            store.put(_VICTIM)
        with self.open_store(place, clock, Limits()) as store:
            assert entry_in(store, _VICTIM.key).digest == _VICTIM.digest
            assert store.stats().entries == 1

    def test_shared_entries_are_seen_at_once(self, store: Store, place: Path, clock: ManualClock) -> None:
        if not store.capabilities.shared:
            lacks("shared")
        with self.open_store(place, clock, Limits()) as other:
            store.put(_VICTIM)
            assert entry_in(other, _VICTIM.key).digest == _VICTIM.digest
            assert other.put(rival_of(_VICTIM)).status is PutStatus.CONFLICT
            if deletes(other):
                other.delete(_VICTIM.key)
                assert store.get(_VICTIM.key) is None

    def test_closing_twice_is_harmless(self, place: Path, clock: ManualClock) -> None:
        store = self.open_store(place, clock, Limits())
        store.close()
        store.close()

    # ---- hostile media ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("corruption", [c for c in _CORRUPTIONS if not c.at_unpack], ids=lambda c: c.name)
    def test_corrupt_bytes_are_never_served(self, store: Store, place: Path, corruption: Corruption) -> None:
        self.raw_write(place, _VICTIM.key, corruption.data)
        with no_unpickling(), pytest.raises(CorruptEntry) as caught:
            store.get(_VICTIM.key)
        assert caught.value.reason is corruption.reason
        assert caught.value.kind is FailureKind.CORRUPT
        if self.sets_aside:
            assert store.get(_VICTIM.key) is None
            assert store.put(_VICTIM).status is PutStatus.CREATED
            assert entry_in(store, _VICTIM.key).digest == _VICTIM.digest

    @pytest.mark.parametrize("corruption", [c for c in _CORRUPTIONS if not c.at_unpack], ids=lambda c: c.name)
    def test_corrupt_bytes_do_not_stop_a_put(self, store: Store, place: Path, corruption: Corruption) -> None:
        if not self.sets_aside:
            pytest.skip("capability: the store leaves what is corrupt to another to set aside")
        self.raw_write(place, _VICTIM.key, corruption.data)
        assert store.put(_VICTIM).status is PutStatus.CREATED
        assert entry_in(store, _VICTIM.key).digest == _VICTIM.digest

    @pytest.mark.parametrize("corruption", [c for c in _CORRUPTIONS if c.at_unpack], ids=lambda c: c.name)
    def test_a_lying_payload_is_caught_before_a_loader(self, store: Store, place: Path, corruption: Corruption) -> None:
        self.raw_write(place, _VICTIM.key, corruption.data)
        with no_unpickling(), pytest.raises(CorruptEntry) as caught:
            entry_in(store, _VICTIM.key).executable()
        assert caught.value.reason is corruption.reason

    def test_listing_leaves_out_what_is_no_entry(self, store: Store, place: Path) -> None:
        if not store.capabilities.iterates:
            lacks("iterates")
        good = entry_for("good neighbour")
        store.put(good)
        for i, data in enumerate([b"", b"garbage", bytes(100_000), bytes(_VICTIM.buffer)]):
            self.raw_write(place, key_for(f"no entry {i}"), data)
        with no_unpickling():
            assert [info.key for info in store.iterate()] == [good.key]
            store.stats()

    # ---- limits ----------------------------------------------------------------------------------------------

    def test_bytes_stay_under_the_limit(self, place: Path, clock: ManualClock) -> None:
        limits = Limits(bytes=256 << 10)
        with self._evicting(place, clock, limits) as store:
            for i in range(60):
                clock.advance(1)
                entry = entry_for(f"filling {i}", size_bytes=7000)
                assert store.put(entry).status is PutStatus.CREATED
                assert store.stats().size_bytes <= limits.bytes
                assert entry_in(store, entry.key).digest == entry.digest
            assert 5 <= store.stats().entries < 60

    def test_entries_stay_under_the_limit(self, place: Path, clock: ManualClock) -> None:
        limits = Limits(entries=10)
        with self._evicting(place, clock, limits) as store:
            for i in range(40):
                clock.advance(1)
                entry = entry_for(f"counting {i}", size_bytes=100)
                store.put(entry)
                assert store.stats().entries <= limits.entries
                assert entry_in(store, entry.key).digest == entry.digest
            assert store.stats().entries >= 5

    def test_an_entry_over_the_limit_is_refused_by_name(self, place: Path, clock: ManualClock) -> None:
        limits = Limits(bytes=64 << 10)
        with self._evicting(place, clock, limits) as store:
            small, large = entry_for("small"), entry_for("large", size_bytes=100 << 10)
            store.put(small)
            with pytest.raises(EntryTooLarge) as caught:
                store.put(large)
            assert caught.value.size_bytes >= large.size_bytes
            assert caught.value.limit_bytes is not None
            assert store.get(large.key) is None
            assert entry_in(store, small.key).digest == small.digest

    @contextlib.contextmanager
    def _evicting(self, place: Path, clock: ManualClock, limits: Limits) -> Iterator[Store]:
        with self.open_store(place, clock, limits) as store:
            if not store.capabilities.evicts:
                lacks("evicts")
            yield store

    # ---- faults ----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", [FailureKind.FULL, FailureKind.IO, FailureKind.FORBIDDEN])
    def test_a_failed_put_leaves_nothing(self, store: Store, place: Path, kind: FailureKind) -> None:
        store.put(_VICTIM)
        names = set(self.raw_names(place))
        entry = entry_for("put in vain")
        with self.broken(kind):
            with pytest.raises(StoreError) as caught:
                store.put(entry)
            assert caught.value.kind is kind
        # Nothing new; a full store may have dropped what it had to make room.
        assert set(self.raw_names(place)) <= names
        assert store.get(entry.key) is None
        assert store.stats().entries <= 1
        assert store.put(entry).status is PutStatus.CREATED

    @pytest.mark.parametrize("kind", [FailureKind.IO, FailureKind.FORBIDDEN])
    def test_a_failed_get_is_no_miss(self, store: Store, kind: FailureKind) -> None:
        store.put(_VICTIM)
        with self.broken(kind):
            with pytest.raises(StoreError) as caught:
                store.get(_VICTIM.key)
            assert caught.value.kind is kind
        assert entry_in(store, _VICTIM.key).digest == _VICTIM.digest

    # ---- many at once ----------------------------------------------------------------------------------------

    def test_threads_agree(self, store: Store) -> None:
        names = [f"shared {i}" for i in range(6)]
        start = threading.Barrier(8)

        def work(thread: int) -> list[tuple[str, PutStatus]]:
            start.wait()
            statuses = []
            for name in names:
                entry = entry_for(name, executable=f"{name} by {thread}".encode() * 100)
                outcome = store.put(entry)
                statuses.append((name, outcome.status))
                assert entry_in(store, entry.key).digest == outcome.digest
            return statuses

        with ThreadPoolExecutor(8) as pool:
            outcomes = [outcome for done in pool.map(work, range(8)) for outcome in done]
        created = Counter(name for name, status in outcomes if status is PutStatus.CREATED)
        assert created == Counter(names)
        assert store.stats().entries == len(names)

    def test_processes_agree(self, store: Store, place: Path) -> None:
        if not store.capabilities.shared:
            lacks("shared")
        opener, arguments = self.opener(place)
        names = [f"shared {i}" for i in range(10)]
        jobs = [Job(opener=opener, arguments=arguments, names=names, variant=str(i), rounds=3) for i in range(3)]
        workers = [job.start() for job in jobs]
        results = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0, 0]
        assert [error for result in results for error in result["errors"]] == []
        for name in names:
            puts = [put for result in results for put in result["puts"][name]]
            assert [status for status, _ in puts].count(PutStatus.CREATED) == 1
            digests = {digest for _, digest in puts} | {d for result in results for d in result["gets"][name]}
            assert digests == {entry_in(store, key_for(name)).digest}

    # ---- random histories ------------------------------------------------------------------------------------

    def test_random_histories_match_a_dict(self, tmp_path: Path) -> None:
        places = iter(range(1 << 30))

        def open_fresh() -> tuple[Path, ManualClock, Callable[[], Store]]:
            place, clock = tmp_path / f"model {next(places)}", ManualClock()
            return place, clock, lambda: self.open_store(place, clock, Limits())

        run_model(open_fresh, self._corrupt if self.sets_aside else None, examples=self.model_examples)

    def _corrupt(self, place: Path, key: Key) -> bool:
        """Damages the stored entry of `key`; False where the medium cannot be reached."""
        if type(self).raw_write is StoreSuite.raw_write:
            return False
        raw = self.raw_read(place, key)
        assert raw is not None
        self.raw_write(place, key, raw[:-1] + bytes([raw[-1] ^ 1]))
        return True
