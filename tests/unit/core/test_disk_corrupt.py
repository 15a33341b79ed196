"""What the disk store does with bytes that are no entry: never served, set aside, reported."""

from __future__ import annotations

import errno
import os
import stat
import tracemalloc
from pathlib import Path

import pytest

from support.disk_bench import Bench
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason
from torchtpu_cache_core.manifest import Attestation, Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Namespace
from torchtpu_cache_core.stores import quarantine, reading
from torchtpu_cache_core.stores.wrap import CheckedStore
from torchtpu_cache_core.testing.entries import (
    corruptions,
    entry_for,
    header_fields,
    key_for,
    rival_of,
    sealed,
    too_large_prefix,
)
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles
from torchtpu_cache_core.testing.store_suite import MACHINE_KEY
from torchtpu_cache_core.testing.unpickling import no_unpickling

_ENTRY = entry_for("the entry")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "root")


# ---- what is corrupt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [b"x", b"\x89TTCM\r\n\x1a", bytes(100)])
def test_anything_but_a_block_behind_an_entry_is_corrupt(bench: Bench, damage: bytes) -> None:
    bench.path(_ENTRY.key).write_bytes(bytes(_ENTRY.buffer) + damage)
    with pytest.raises(CorruptEntry) as caught:
        bench.open().get(_ENTRY.key)
    assert caught.value.reason is CorruptReason.MANIFEST


def test_a_damaged_or_cut_block_is_corrupt(bench: Bench) -> None:
    block = Attestation.by_machine(MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY).to_block()
    store = bench.open()
    for cut in (block[:-1], block + b"\0", block[:20] + b"?" + block[21:], block * 2):
        bench.path(_ENTRY.key).write_bytes(bytes(_ENTRY.buffer) + cut)
        with pytest.raises(CorruptEntry) as caught:
            store.get(_ENTRY.key)
        assert caught.value.reason is CorruptReason.MANIFEST


def test_a_manifest_of_something_else_is_corrupt(bench: Bench) -> None:
    manifest = Manifest(
        namespace=Namespace("other"),
        key=_ENTRY.key,
        generation=1,
        digest=_ENTRY.digest,
        size_bytes=_ENTRY.size_bytes,
        writer="local",
        created_seconds=1.0,
    )
    bench.path(_ENTRY.key).write_bytes(bytes(_ENTRY.buffer) + Attestation(manifest).to_block())
    with pytest.raises(CorruptEntry) as caught:
        bench.open().get(_ENTRY.key)
    assert caught.value.reason is CorruptReason.MANIFEST


def test_lengths_over_every_cap_are_corrupt(bench: Bench) -> None:
    store = bench.open()
    for data in (too_large_prefix(), sealed(b"{}", b"", payload_bytes=2 << 30)):
        bench.path(_ENTRY.key).write_bytes(data)
        with pytest.raises(CorruptEntry):
            store.get(_ENTRY.key)
    with bench.path(_ENTRY.key).open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(CorruptEntry) as caught:
        store.get(_ENTRY.key)
    assert caught.value.reason is CorruptReason.LENGTH


def test_a_large_file_that_is_no_entry_costs_no_memory(bench: Bench) -> None:
    """Of honest lengths and the right header, down to a trailer that is not there."""
    large = 100 << 20
    honest = {**header_fields(_ENTRY), "codec": "raw", "executable_bytes": large}
    planted = [
        (bytes(_ENTRY.buffer), CorruptReason.MANIFEST),
        (b"", CorruptReason.MAGIC),
        (sealed(honest, b"", payload_bytes=large)[:-32], CorruptReason.DIGEST),
        (sealed(header_fields(entry_for("other")), b"", payload_bytes=large)[:-32], CorruptReason.KEY),
        (sealed(honest, b"", payload_bytes=large * 2)[:-32], CorruptReason.SHORT),
    ]
    for data, reason in planted:
        size = len(data) + large + (32 if reason in (CorruptReason.DIGEST, CorruptReason.KEY) else 0)
        with bench.path(_ENTRY.key).open("wb") as sparse:
            sparse.write(data)
            sparse.truncate(size)
        tracemalloc.start()
        try:
            with pytest.raises(CorruptEntry) as caught:
                bench.open().get(_ENTRY.key)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert caught.value.reason is reason
        assert peak_bytes < 8 << 20


def test_what_is_checked_first_is_checked_alike(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Attestation.by_machine(MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY).to_block()
    for first_bytes in (1 << 30, 0):
        monkeypatch.setattr(reading, "_CHECKED_FIRST_BYTES", first_bytes)
        for corruption in corruptions(_ENTRY):
            bench.path(_ENTRY.key).write_bytes(corruption.data)
            with pytest.raises(CorruptEntry) as caught:
                CheckedStore(bench.open()).get(_ENTRY.key)
            assert caught.value.reason is corruption.reason, corruption.name
        for behind in (b"", block):
            bench.path(_ENTRY.key).write_bytes(bytes(_ENTRY.buffer) + behind)
            stored = bench.open().get(_ENTRY.key)
            assert stored is not None
            assert stored.entry.digest == _ENTRY.digest
            bench.open().delete(_ENTRY.key)


def test_a_mark_of_another_entry_or_machine_is_corrupt(bench: Bench) -> None:
    """The payload was exchanged and all digests made anew: the mark alone still tells."""
    rival = rival_of(_ENTRY)
    mark = Attestation.by_machine(MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY)
    theirs = [
        (rival, mark),
        (_ENTRY, Attestation.by_machine(MACHINE_KEY, Namespace("other"), _ENTRY)),
        (_ENTRY, Attestation.by_machine(bytes(32), DEFAULT_NAMESPACE, _ENTRY)),
    ]
    for entry, attestation in theirs:
        bench.path(_ENTRY.key).write_bytes(bytes(entry.buffer) + attestation.to_block())
        assert bench.open().get(_ENTRY.key) is not None  # who does not know the key takes a mark as it is
        with pytest.raises(CorruptEntry) as caught:
            bench.open(machine_key=MACHINE_KEY).get(_ENTRY.key)
        assert caught.value.reason is CorruptReason.SIGNATURE
    for attestation in (mark, None):
        bench.open().put(_ENTRY, attestation)
        assert bench.open(machine_key=MACHINE_KEY).get(_ENTRY.key) is not None
        bench.open().delete(_ENTRY.key)


def test_the_quarantine_tells_what_and_why(bench: Bench) -> None:
    bench.path(_ENTRY.key).write_bytes(b"garbage" * 10)
    store = bench.open()
    with pytest.raises(CorruptEntry):
        store.get(_ENTRY.key)
    [kept] = store.quarantined()
    assert (kept.key, kept.reason, kept.size_bytes) == (_ENTRY.key, CorruptReason.MAGIC, 70)
    assert kept.set_aside_seconds == pytest.approx(bench.clock.time(), abs=0.01)
    assert kept.path.read_bytes() == b"garbage" * 10


def test_the_quarantine_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_FILES", 5)
    monkeypatch.setattr(quarantine, "MAX_BYTES", 40_000)
    store = bench.open()
    for _ in range(12):
        bench.clock.advance(1)
        bench.path(_ENTRY.key).write_bytes(bytes(100))
        with pytest.raises(CorruptEntry):
            store.get(_ENTRY.key)
    newest = bench.clock.time()
    assert [round(newest - kept.set_aside_seconds) for kept in store.quarantined()] == [4, 3, 2, 1, 0]
    (bench.layout.quarantine / "notes").write_bytes(b"theirs")
    bench.path(_ENTRY.key).write_bytes(bytes(35_000))
    with pytest.raises(CorruptEntry):
        store.get(_ENTRY.key)
    assert len(store.quarantined()) < 5
    assert (bench.layout.quarantine / "notes").exists()


def test_set_aside_frees_the_key(bench: Bench) -> None:
    store = bench.open()
    assert store.set_aside(_ENTRY.key, CorruptReason.PAYLOAD) is False
    store.put(_ENTRY)
    assert store.set_aside(_ENTRY.key, CorruptReason.PAYLOAD) is True
    assert store.get(_ENTRY.key) is None
    assert store.stats().entries == 0
    assert [kept.reason for kept in store.quarantined()] == [CorruptReason.PAYLOAD]


def test_a_good_entry_that_took_the_place_of_a_bad_one_stays(bench: Bench) -> None:
    """Between a reader's look and its move, another process may have set the bad one aside and published anew."""
    path = bench.path(_ENTRY.key)
    path.write_bytes(b"garbage")

    class Late(FaultyFiles):
        def close(self, fd: int) -> None:
            super().close(fd)
            path.unlink()
            path.write_bytes(bytes(_ENTRY.buffer))

    bench.files = Late()
    with pytest.raises(CorruptEntry):
        bench.open().get(_ENTRY.key)
    assert path.read_bytes() == bytes(_ENTRY.buffer)


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_finds_and_repairs(bench: Bench) -> None:
    store = bench.open()
    good, flipped, lying, garbage = (entry_for(name) for name in ("good", "flipped", "lying", "garbage"))
    for entry in (good, flipped):
        store.put(entry)
    raw = bench.path(flipped.key).read_bytes()
    bench.path(flipped.key).write_bytes(raw[:-40] + b"!" + raw[-39:])
    fields = {**header_fields(lying), "codec": "zstd"}
    bench.path(lying.key).write_bytes(sealed(fields, b"no zstd"))
    bench.path(garbage.key).write_bytes(b"garbage" * 10)
    expected = {
        flipped.key: CorruptReason.DIGEST,
        lying.key: CorruptReason.PAYLOAD,
        garbage.key: CorruptReason.MAGIC,
    }
    report = store.verify(repair=False)
    assert {bad.key: bad.reason for bad in report.bad} == expected
    assert not any(bad.set_aside for bad in report.bad)
    assert report.entries == 1
    assert {bad.key for bad in store.verify(repair=True).bad if bad.set_aside} == set(expected)
    assert store.verify(repair=False).bad == []
    assert {kept.key: kept.reason for kept in store.quarantined()} == expected
    assert store.get(good.key) is not None


def test_verify_names_what_cannot_be_read(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    with bench.files.failing(Fault(call="open", error=errno.EACCES, within=_ENTRY.key)):
        report = store.verify(repair=True)
    assert [key for key, _ in report.unreadable] == [_ENTRY.key]
    assert store.get(_ENTRY.key) is not None


def test_entry_files_are_regular_and_never_rewritten(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    before = bench.path(_ENTRY.key).stat()
    store.put(entry_for("the entry"))
    after = bench.path(_ENTRY.key).stat()
    assert stat.S_ISREG(after.st_mode)
    assert (before.st_ino, before.st_size, before.st_nlink) == (after.st_ino, after.st_size, 1)


# ---- hostile entries (A17) -------------------------------------------------------------------------------------------


def test_no_planted_entry_runs_code_or_writes_outside(bench: Bench) -> None:
    """Get, list, stats, verify, gc and eviction over every hostile file at once."""
    planted = {key_for(f"planted {i}"): c for i, c in enumerate(corruptions(_ENTRY))}
    for key, corruption in planted.items():
        bench.path(key).write_bytes(corruption.data)
    store = bench.open(limit_entries=10)
    outside = sorted(path for path in bench.root.parent.iterdir() if path != bench.root)
    with no_unpickling():
        assert list(store.iterate()) == []
        store.stats()
        report = store.verify(repair=False)
        assert {bad.key for bad in report.bad} == set(planted)
        for key in list(planted)[::2]:
            with pytest.raises(CorruptEntry):
                store.get(key)
        for i in range(30):
            store.put(entry_for(f"good {i}", compile_seconds=0.0))
        store.gc()
        assert store.verify(repair=True).entries <= 10
    assert "TORCHTPU_CACHE_PICKLE_BOMB" not in os.environ
    assert sorted(path for path in bench.root.parent.iterdir() if path != bench.root) == outside
