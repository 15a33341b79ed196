"""What the disk store does beside the contract: foreign things, leftovers, marks, quarantine, accounts, limits."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, FailureKind, StoreFull, StoreRefused
from torchtpu_cache_core.manifest import Attestation, Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key, Namespace
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.stores import quarantine
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout, shard_of
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import corruptions, entry_for, header_fields, key_for, sealed, too_large_prefix
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles
from torchtpu_cache_core.testing.store_suite import MACHINE_KEY
from torchtpu_cache_core.testing.unpickling import no_unpickling

_ENTRY = entry_for("the entry")
_TEMP = ".tmp-123-0123456789abcdef"


class Bench:
    """A disk store with its clock, its files and a way past it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.layout = Layout(root, DEFAULT_NAMESPACE)

    def open(self, *, limit_bytes: int = 1 << 30, limit_entries: int = 10_000, min_free_bytes: int = 0) -> DiskStore:
        return DiskStore(
            self.root,
            DEFAULT_NAMESPACE,
            limit_bytes=limit_bytes,
            limit_entries=limit_entries,
            min_free_bytes=min_free_bytes,
            clock=self.clock,
            files=self.files,
        )

    def path(self, key: Key) -> Path:
        path = self.layout.entry(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def age(self, path: Path, seconds: float) -> None:
        when = self.clock.time() - seconds
        os.utime(path, (when, when), follow_symlinks=False)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "root")


# ---- things that are not ours ----------------------------------------------------------------------------------


def _plant(kind: str, path: Path) -> None:
    match kind:
        case "folder":
            path.mkdir()
            (path / "inside").write_bytes(b"theirs")
        case "dangling symlink":
            path.symlink_to("nowhere")
        case "symlink to a good entry":
            elsewhere = path.parents[3] / "elsewhere"
            elsewhere.write_bytes(bytes(_ENTRY.buffer))
            path.symlink_to(elsewhere)
        case "socket":
            with socket.socket(socket.AF_UNIX) as listener:
                os.chdir(path.parent)  # the path itself is too long for a socket
                listener.bind(path.name)
        case "named pipe":
            os.mkfifo(path)


_KINDS = ["folder", "dangling symlink", "symlink to a good entry", "socket", "named pipe"]


@pytest.mark.parametrize("kind", _KINDS)
def test_what_is_named_like_an_entry_is_never_served_nor_deleted(
    bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.root.parent)  # puts the working directory back
    path = bench.path(_ENTRY.key)
    _plant(kind, path)
    before = path.lstat()
    store = bench.open(limit_entries=5)
    assert not store.contains(_ENTRY.key)
    assert store.delete(_ENTRY.key) is False
    assert list(store.iterate()) == []
    for i in range(12):  # to the limit and beyond
        store.put(entry_for(f"other {i}"))
    store.gc()
    assert os.path.samestat(path.lstat(), before)
    with pytest.raises(CorruptEntry):
        store.get(_ENTRY.key)
    assert store.get(_ENTRY.key) is None
    [kept] = store.quarantined()
    assert os.path.samestat(kept.path.lstat(), before)
    assert store.put(_ENTRY).status is PutStatus.CREATED


@pytest.mark.parametrize("kind", _KINDS)
def test_a_put_moves_away_what_stands_under_its_key(bench: Bench, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.root.parent)
    _plant(kind, bench.path(_ENTRY.key))
    store = bench.open()
    assert store.put(_ENTRY).status is PutStatus.CREATED
    assert len(store.quarantined()) == 1


def test_what_cannot_be_moved_away_is_refused_not_overwritten(bench: Bench) -> None:
    bench.path(_ENTRY.key).mkdir()
    store = bench.open()
    with bench.files.failing(Fault(call="rename", error=errno.EBUSY)):
        with pytest.raises(StoreRefused, match="cannot be moved away"):
            store.put(_ENTRY)
        assert store.put(entry_for("another")).status is PutStatus.CREATED


@pytest.mark.parametrize("name", ["notes.txt", _ENTRY.key + ".bak", "ttc1-" + "A" * 64, ".tmp-mine", "core", ".nfs01"])
def test_files_of_other_names_are_left_alone(bench: Bench, name: str) -> None:
    store = bench.open(limit_entries=3)
    path = bench.path(_ENTRY.key).parent / name
    path.write_bytes(b"theirs")
    bench.age(path, 1e6)
    for i in range(10):
        store.put(entry_for(f"other {i}"))
    assert name in store.gc().foreign
    assert name in store.verify(repair=True).foreign
    assert path.read_bytes() == b"theirs"
    assert all(info.key != name for info in store.iterate())


def test_a_key_in_the_wrong_shard_is_foreign(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    other = bench.layout.shard_dir((shard_of(_ENTRY.key) + 1) % 256)
    other.mkdir()
    (other / _ENTRY.key).write_bytes(bytes(_ENTRY.buffer))
    assert [info.key for info in store.iterate()] == [_ENTRY.key]
    assert store.gc().foreign == (_ENTRY.key,)


def test_garbage_under_keys_does_not_stop_eviction(bench: Bench) -> None:
    for i in range(20):
        bench.path(key_for(f"garbage {i}")).write_bytes(b"garbage")
    store = bench.open(limit_entries=5)
    for i in range(20):
        store.put(entry_for(f"good {i}"))
    report = store.gc()
    assert report.entries <= 5
    assert store.verify(repair=False).bad == []
    assert len(store.quarantined()) == 20


@pytest.mark.parametrize("when", [-1e9, 0.0, 4e9])
def test_absurd_access_marks_do_no_harm(bench: Bench, when: float) -> None:
    store = bench.open(limit_entries=5)
    for i in range(5):
        entry = entry_for(f"old {i}")
        store.put(entry)
        os.utime(bench.path(entry.key), (when, when))
    for i in range(10):
        bench.clock.advance(1)
        assert store.put(entry_for(f"new {i}")).status is PutStatus.CREATED
        assert store.stats().entries <= 5
    assert store.get(key_for("new 9")) is not None


# ---- leftovers of writers (A08) --------------------------------------------------------------------------------


def test_a_file_being_written_is_seen_by_nobody_and_outlives_collection(bench: Bench) -> None:
    store = bench.open()
    store.put(entry_for("neighbour"))
    temp = bench.path(_ENTRY.key).parent / _TEMP
    temp.write_bytes(bytes(_ENTRY.buffer)[:1000])
    bench.age(temp, 1e6)
    with temp.open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert store.get(_ENTRY.key) is None
        assert [info.key for info in store.iterate()] == [key_for("neighbour")]
        assert store.verify(repair=True).entries == 1
        assert store.gc().leftovers_removed == 0
        assert temp.exists()
    assert store.gc().leftovers_removed == 1
    assert not temp.exists()


def test_a_young_leftover_waits(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    temp = bench.path(_ENTRY.key).parent / _TEMP
    temp.write_bytes(b"half")
    bench.age(temp, 30)
    assert store.gc().leftovers_removed == 0
    bench.clock.advance(60)
    assert store.gc().leftovers_removed == 1


def test_without_locks_leftovers_go_by_age_alone(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    temp = bench.path(_ENTRY.key).parent / _TEMP
    temp.write_bytes(b"half")
    bench.age(temp, 3600)
    with bench.files.failing(Fault(call="flock", error=errno.ENOLCK)):
        assert store.gc().leftovers_removed == 0
        bench.clock.advance(86_400)
        assert store.gc().leftovers_removed == 1


def test_puts_collect_leftovers_in_passing(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    temp = bench.path(_ENTRY.key).parent / _TEMP
    temp.write_bytes(b"half")
    bench.age(temp, 120)
    bench.clock.advance(2 * 3600)  # every shard is due again
    for i in range(300):
        store.put(entry_for(f"passing {i}", compile_seconds=0.0))
    assert not temp.exists()


# ---- access marks ----------------------------------------------------------------------------------------------


def test_a_hit_writes_nothing_but_one_mark_a_minute(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    bench.files.calls.clear()
    for _ in range(10):
        bench.clock.advance(5)
        store.get(_ENTRY.key)
    assert set(bench.files.calls) <= {"open", "fstat", "read"}
    bench.clock.advance(30)
    for _ in range(10):
        store.get(_ENTRY.key)
    assert bench.files.calls.count("utime") == 1
    [info] = store.iterate()
    assert info.accessed_seconds == pytest.approx(bench.clock.time(), abs=1)


def test_a_mark_that_cannot_be_set_is_no_failure(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    bench.clock.advance(1000)
    with bench.files.failing(Fault(call="utime", error=errno.EROFS)):
        assert store.get(_ENTRY.key) is not None
    assert bench.files.hits == {"utime": 1}


# ---- what is corrupt -------------------------------------------------------------------------------------------


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


# ---- the account -----------------------------------------------------------------------------------------------


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
    with store._room._account.changing() as ledger:  # what a writer leaves that is killed after it reserved
        ledger.reserve(shard_of(_ENTRY.key), 1 << 20)
    assert store.stats().size_bytes == before.size_bytes + (1 << 20)
    store.gc()
    assert store.stats() == before


def test_a_folder_that_cannot_be_listed_stops_no_put(bench: Bench) -> None:
    store = bench.open()
    store.put(_ENTRY)
    bench.clock.advance(7200)
    denied = Fault(call="listdir", error=errno.EACCES, within=f"/{shard_of(_ENTRY.key):02x}")
    with bench.files.failing(denied):
        for i in range(300):
            store.put(entry_for(f"other {i}", compile_seconds=0.0))
    assert bench.files.hits["listdir"] == 1


# ---- room ------------------------------------------------------------------------------------------------------


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
        bench.clock.advance(90)
        store.put(entry_for(f"later {i}", compile_seconds=0.005))
    assert not store.contains(key_for("dear")), "what nobody uses must go at last, however dear it was"


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


# ---- rights ----------------------------------------------------------------------------------------------------


def test_everything_is_private(bench: Bench) -> None:
    old = os.umask(0)
    try:
        bench.open().put(_ENTRY, Attestation.by_machine(MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY))
    finally:
        os.umask(old)
    for path in [bench.root, *bench.root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_root_that_others_may_write_to_is_refused(bench: Bench) -> None:
    bench.root.mkdir()
    bench.root.chmod(0o777)
    with pytest.raises(StoreRefused, match="chmod go-w"):
        bench.open()


def test_a_read_only_store_still_answers(bench: Bench) -> None:
    bench.open().put(_ENTRY)
    bench.clock.advance(1000)
    read_only = [
        Fault(call=c, error=errno.EROFS) for c in ("write", "pwrite", "mkdir", "link", "rename", "unlink", "utime")
    ]

    class ReadOnly(FaultyFiles):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return super().open(path, flags, mode)

    bench.files = ReadOnly(*read_only)
    store = bench.open()
    assert store.get(_ENTRY.key) is not None
    assert store.stats().entries == 1
    assert store.verify(repair=True).entries == 1
    with pytest.raises(StoreRefused) as caught:
        store.put(entry_for("another"))
    assert caught.value.kind is FailureKind.READ_ONLY
    bench.path(_ENTRY.key).write_bytes(b"garbage")
    for _ in range(2):
        with pytest.raises(CorruptEntry):
            store.get(_ENTRY.key)


def test_a_root_that_is_not_there_is_an_empty_store(bench: Bench) -> None:
    store = bench.open()
    assert store.get(_ENTRY.key) is None
    assert store.stats().entries == 0
    assert (store.gc().entries, store.verify(repair=True).entries, store.quarantined()) == (0, 0, [])
    assert not bench.root.exists()


def test_namespaces_never_meet(bench: Bench) -> None:
    mine = bench.open()
    theirs = DiskStore(
        bench.root, Namespace("other"), limit_bytes=1 << 30, limit_entries=10, min_free_bytes=0, clock=bench.clock
    )
    mine.put(_ENTRY)
    assert theirs.get(_ENTRY.key) is None
    assert theirs.stats().entries == 0
    theirs.put(_ENTRY)
    mine.delete(_ENTRY.key)
    assert theirs.get(_ENTRY.key) is not None


# ---- verify ----------------------------------------------------------------------------------------------------


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


# ---- hostile entries (A17) -------------------------------------------------------------------------------------


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
