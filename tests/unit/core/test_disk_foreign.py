"""What the disk store does with things that are not its own, and with what dead writers left."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest

from support.disk_bench import Bench
from torchtpu_cache_core.errors import CorruptEntry, StoreRefused
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.stores.layout import shard_of
from torchtpu_cache_core.testing.entries import entry_for, key_for
from torchtpu_cache_core.testing.faults import Fault

_ENTRY = entry_for("the entry")
_TEMP = ".tmp-123-0123456789abcdef"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "root")


# ---- things that are not ours ----------------------------------------------------------------------------------------


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


# ---- leftovers of writers (A08) --------------------------------------------------------------------------------------


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
