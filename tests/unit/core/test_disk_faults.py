"""Every operating-system call of the disk store fails once, in every way: nothing but a StoreError comes out, nothing
half-made stays, and the store works again."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import CorruptReason, StoreError
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.stores.account import LOCK_SECONDS
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for, key_for
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles

_OLD = entry_for("old")
_NEW = entry_for("new")
_ERRNOS = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EDQUOT, errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EROFS]


def _open(root: Path, files: FaultyFiles, clock: ManualClock, limit_entries: int = 100) -> DiskStore:
    return DiskStore(
        root,
        DEFAULT_NAMESPACE,
        limit_bytes=1 << 30,
        limit_entries=limit_entries,
        min_free_bytes=0,
        clock=clock,
        files=files,
    )


def _corrupt_old(store: DiskStore, root: Path) -> None:
    path = Layout(root, DEFAULT_NAMESPACE).entry(_OLD.key)
    path.write_bytes(path.read_bytes()[:-1])


_OPERATIONS: dict[str, Callable[[DiskStore], object]] = {
    "get": lambda store: store.get(_OLD.key),
    "get_missing": lambda store: store.get(key_for("missing")),
    "put": lambda store: store.put(_NEW),
    "put_same": lambda store: store.put(_OLD),
    "put_evicting": lambda store: store.put(entry_for("one too many")),
    "contains": lambda store: store.contains(_OLD.key),
    "delete": lambda store: store.delete(_OLD.key),
    "iterate": lambda store: list(store.iterate()),
    "stats": lambda store: store.stats(),
    "gc": lambda store: store.gc(),
    "verify": lambda store: store.verify(repair=True),
    "quarantined": lambda store: store.quarantined(),
    "set_aside": lambda store: store.set_aside(_OLD.key, CorruptReason.PAYLOAD),
    "get_corrupt": lambda store: store.get(_OLD.key),
    "put_over_corrupt": lambda store: store.put(_OLD),
}


def _calls(tmp_path: Path, operation: str) -> list[tuple[str, int]]:
    """Each call that the operation makes, with how many of its kind came before it."""
    files, _ = _run(tmp_path / "dry", operation, [])
    return [(call, files.calls[:i].count(call)) for i, call in enumerate(files.calls)]


def _run(root: Path, operation: str, faults: list[Fault]) -> tuple[FaultyFiles, DiskStore]:
    files, clock = FaultyFiles(), ManualClock()
    store = _open(root, files, clock, limit_entries=3 if operation == "put_evicting" else 100)
    store.put(_OLD)
    for i in range(2):
        store.put(entry_for(f"neighbour {i}"))
    if operation in ("get_corrupt", "put_over_corrupt"):
        _corrupt_old(store, root)
    clock.advance(120)
    files.calls.clear()
    files.faults = faults
    with contextlib.suppress(StoreError):
        _OPERATIONS[operation](store)
    files.faults = []
    return files, store


@pytest.mark.parametrize("operation", _OPERATIONS)
def test_any_call_may_fail_in_any_way(tmp_path: Path, operation: str) -> None:
    calls = _calls(tmp_path, operation)
    # The listing calls repeat per shard; their first and last tell enough.
    tried = {call: [n for c, n in calls if c == call] for call, _ in calls}
    cases = [(call, n) for call, ns in tried.items() for n in sorted({*ns[:3], ns[-1]})]
    for number, (call, skip) in enumerate(cases):
        for code in _ERRNOS[number % 4 :: 4]:
            after = bool((number + code) % 2)
            root = tmp_path / f"{call}-{skip}-{code}-{after}"
            fault = Fault(call=call, error=code, skip=skip, times=1, after=after)
            files, store = _run(root, operation, [fault])
            assert files.hits, fault
            _check_sound(store, root, fault)


def _check_sound(store: DiskStore, root: Path, fault: Fault) -> None:
    report = store.verify(repair=False)
    damaged = {bad.key for bad in report.bad}
    assert damaged <= {_OLD.key}, fault  # only what the test itself damaged
    if damaged:
        store.verify(repair=True)
    leftovers = list((root / "entries").rglob(".tmp-*"))
    assert len(leftovers) <= (fault.call == "unlink"), fault
    for entry in (_OLD, _NEW, entry_for("neighbour 0"), entry_for("neighbour 1")):
        stored = store.get(entry.key)
        assert stored is None or stored.entry.digest == entry.digest, fault
    for entry in (_OLD, _NEW):
        assert store.put(entry).status in (PutStatus.CREATED, PutStatus.SAME), fault
        assert store.get(entry.key) is not None, fault


@pytest.mark.parametrize("call", ["read", "write"])
def test_short_reads_and_writes_are_carried_on(tmp_path: Path, call: str) -> None:
    files = FaultyFiles(Fault(call=call, error=0, within="/entries/"))
    store = _open(tmp_path / "root", files, ManualClock())
    entry = entry_for("long", size_bytes=100_000)
    store.put(entry)
    stored = store.get(entry.key)
    assert stored is not None
    assert stored.entry.digest == entry.digest
    assert files.hits[call] > 3


def test_a_full_disk_evicts_and_tries_again(tmp_path: Path) -> None:
    files = FaultyFiles(Fault(call="write", error=errno.ENOSPC, skip=3, times=1))
    store = _open(tmp_path / "root", files, ManualClock())
    for i in range(3):
        store.put(entry_for(f"earlier {i}"))
    assert store.put(_NEW).status is PutStatus.CREATED
    assert files.hits == {"write": 1}
    assert store.stats().entries == 3


def test_without_hard_links_the_first_still_wins(tmp_path: Path) -> None:
    files = FaultyFiles(Fault(call="link", error=errno.EPERM))
    store = _open(tmp_path / "root", files, ManualClock())
    assert store.put(_OLD).status is PutStatus.CREATED
    assert store.put(_OLD).status is PutStatus.SAME
    assert store.get(_OLD.key) is not None
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EEXIST, errno.EIO, errno.ESTALE])
def test_a_link_whose_answer_was_lost_has_succeeded(tmp_path: Path, code: int) -> None:
    files = FaultyFiles(Fault(call="link", error=code, after=True))
    store = _open(tmp_path / "root", files, ManualClock())
    assert store.put(_OLD).status is PutStatus.CREATED
    assert store.stats().entries == 1
    assert not list(tmp_path.rglob(".tmp-*"))


def test_without_locks_it_still_works(tmp_path: Path) -> None:
    files = FaultyFiles(Fault(call="flock", error=errno.ENOLCK))
    store = _open(tmp_path / "root", files, ManualClock())
    assert store.put(_OLD).status is PutStatus.CREATED
    assert store.stats().entries == 1


def test_a_cancelled_put_leaves_nothing(tmp_path: Path) -> None:
    class Cancelled(BaseException):
        pass

    class Cancelling(FaultyFiles):
        def utime(self, fd: int, seconds: float) -> None:
            raise Cancelled

    root = tmp_path / "root"
    with pytest.raises(Cancelled):
        _open(root, Cancelling(), ManualClock()).put(_NEW)
    store = _open(root, FaultyFiles(), ManualClock())
    assert not [name for _, _, names in os.walk(root / "entries") for name in names]
    assert store.stats() == _open(tmp_path / "other", FaultyFiles(), ManualClock()).stats()
    assert store.put(_NEW).status is PutStatus.CREATED


def test_a_slow_lock_holder_costs_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtpu_cache_core.stores.account.LOCK_SECONDS", 0.05)
    files = FaultyFiles(Fault(call="flock", error=errno.EWOULDBLOCK, within="/accounts/"))
    store = _open(tmp_path / "root", files, ManualClock())
    with pytest.raises(StoreError, match="too long"):
        store.put(_NEW)
    files.faults = []
    assert store.put(_NEW).status is PutStatus.CREATED


def test_a_stopped_lock_holder_costs_one_long_wait_and_not_one_per_put(tmp_path: Path) -> None:
    files = FaultyFiles(Fault(call="flock", error=errno.EWOULDBLOCK, within="/accounts/"))
    store = _open(tmp_path / "root", files, ManualClock())
    started = time.monotonic()
    for number in range(10):
        with pytest.raises(StoreError, match="too long"):
            store.put(entry_for(f"number {number}"))
    assert time.monotonic() - started < 2 * LOCK_SECONDS
    files.faults = []
    assert store.put(_NEW).status is PutStatus.CREATED
