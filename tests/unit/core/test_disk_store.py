"""How the disk store marks accesses, and whom it lets in."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from support.disk_bench import Bench
from torchtpu_cache_core.errors import CorruptEntry, FailureKind, StoreRefused
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Namespace
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles
from torchtpu_cache_core.testing.store_suite import MACHINE_KEY

_ENTRY = entry_for("the entry")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "root")


# ---- access marks ----------------------------------------------------------------------------------------------------


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


# ---- rights ----------------------------------------------------------------------------------------------------------


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


# ---- order of publication --------------------------------------------------------------------------------------


def _order(bench: Bench) -> list[str]:
    return [call for call in bench.files.calls if call in ("write", "fsync", "link", "unlink")]


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_answer(bench: Bench) -> None:
    store = bench.open()
    store.put(entry_for("makes the folders"))
    bench.path(_ENTRY.key)
    bench.files.calls.clear()
    store.put(_ENTRY)
    assert _order(bench) == ["write", "fsync", "link", "fsync", "unlink"]


def test_what_is_cheap_to_compile_is_not_waited_for(bench: Bench) -> None:
    store = bench.open()
    store.put(entry_for("makes the folders"))
    cheap = entry_for("cheap", compile_seconds=0.009)
    bench.path(cheap.key)
    bench.files.calls.clear()
    store.put(cheap)
    assert _order(bench) == ["write", "link", "unlink"]


# ---- locks -----------------------------------------------------------------------------------------------------------


class ForkingFiles(FaultyFiles):
    """Forks a child, which lives until it is ended, whenever a lock is taken."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__(*faults)
        self.locked: set[Path] = set()
        self.children: list[int] = []

    def flock(self, fd: int, operation: int) -> None:
        super().flock(fd, operation)
        if operation & fcntl.LOCK_EX:
            self.locked.add(Path(f"/proc/self/fd/{fd}").readlink())
            if (pid := os.fork()) == 0:
                signal.pause()
            self.children.append(pid)

    def end(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_child_that_was_forked_under_a_lock_does_not_keep_it(bench: Bench) -> None:
    """The account's, and the folder's where there are no hard links."""
    bench.files = files = ForkingFiles(Fault(call="link", error=errno.EPERM))
    try:
        bench.open().put(_ENTRY)
        free = [path for path in files.locked if path.exists()]
        assert {bench.layout.account, bench.path(_ENTRY.key).parent} <= set(free)
        for path in free:
            fd = os.open(path, os.O_RDONLY)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(fd)
    finally:
        files.end()
