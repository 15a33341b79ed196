"""The disk store among real processes: a flaky shared file system, a full one, many small puts."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import StoreError, StoreFull
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for, key_for


def _start(source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def _open(root: Path, limit_bytes: int = 1 << 30) -> DiskStore:
    return DiskStore(
        root,
        DEFAULT_NAMESPACE,
        limit_bytes=limit_bytes,
        limit_entries=100_000,
        min_free_bytes=0,
        clock=ManualClock(),
    )


_FLAKY = """
import errno, json, sys
from pathlib import Path
from torchtpu_cache_core.errors import StoreError
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles
root, me = sys.argv[1], int(sys.argv[2])
files = FaultyFiles(
    Fault(call="unlink", error=errno.EBUSY, rate=0.05),
    Fault(call="unlink", error=errno.EBUSY, rate=0.05, after=True),
    Fault(call="open", error=errno.ENOENT, rate=0.05, within="/entries/"),
    Fault(call="link", error=errno.ENOENT, rate=0.05, after=True),
    Fault(call="read", error=errno.ESTALE, rate=0.05, within="/entries/"),
    Fault(call="mkdir", error=errno.EEXIST, rate=0.05),
    seed=me,
)
store = DiskStore(
    Path(root), DEFAULT_NAMESPACE, limit_bytes=1 << 30, limit_entries=1000, min_free_bytes=0, files=files
)
seen, gave_up = {}, 0
for _ in range(3):
    for i in range(20):
        entry = entry_for(f"shared {i}", compile_seconds=0.0, executable=f"{i} by {me} ".encode() * 100)
        try:
            seen.setdefault(entry.key, set()).add(store.put(entry).digest)
            stored = store.get(entry.key)
        except StoreError:
            gave_up += 1  # counted by the caller, who compiles
            continue
        if stored is not None:
            stored.entry.check(entry.key)
            seen[entry.key].add(stored.entry.digest)
print(json.dumps({"seen": {k: sorted(v) for k, v in seen.items()}, "gave_up": gave_up, "hits": files.hits}))
"""


def test_a_flaky_shared_file_system_gives_right_answers_or_none(tmp_path: Path) -> None:
    """A09: busy, stale, vanished and already-there, each at 5 %, for eight processes on the same keys."""
    root = tmp_path / "root"
    workers = [_start(_FLAKY, str(root), str(i)) for i in range(8)]
    results = [json.loads(worker.communicate(timeout=100)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8
    assert sum(sum(result["hits"].values()) for result in results) > 50
    assert sum(result["gave_up"] for result in results) <= 8, "retries should carry nearly all through"
    store = _open(root)
    for i in range(20):
        key = key_for(f"shared {i}")
        stored = store.get(key)
        assert stored is not None
        digests = {digest for result in results for digest in result["seen"].get(key, [])}
        assert digests == {stored.entry.digest}, "every process saw the one entry that stands"
    report = store.verify(repair=False)
    assert (report.bad, report.entries) == ([], 20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    mount = tmp_path / "small"
    mount.mkdir(mode=0o700)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m,mode=0700", "none", str(mount)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"capability: this user cannot mount a small file system ({done.stderr.strip()})")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_costs_entries_never_more(small_disk: Path) -> None:
    """A11: limit 18 MB on 20 MB; tiny and large entries; somebody else fills the rest, then leaves."""
    store = _open(small_disk / "root", limit_bytes=18 << 20)
    refused = created = 0
    ballast = small_disk / "theirs"
    for i in range(120):
        if i == 40:
            with ballast.open("wb") as theirs, pytest.raises(OSError, match="No space"):
                while True:
                    theirs.write(bytes(1 << 16))
                    theirs.flush()
        if i == 80:
            ballast.unlink()
        size = 3 << 20 if i % 10 == 0 else 1
        entry = entry_for(f"filling {i}", size_bytes=size)
        try:
            created += store.put(entry).status is PutStatus.CREATED
            assert store.get(entry.key) is not None
        except StoreFull:
            refused += 1
            assert 40 <= i < 80, "there was room"
        assert list(small_disk.rglob(".tmp-*")) == []
        assert store.stats().size_bytes <= 18 << 20
    assert created >= 80
    report = store.verify(repair=False)
    assert (report.bad, report.unreadable) == ([], [])
    used = sum(path.stat().st_blocks * 512 for path in (small_disk / "root/entries").rglob("ttc1-*"))
    assert store.gc().size_bytes == used
    print(f"{created} stored, {refused} refused while the disk was full")


_SMALL = """
import json, sys, time
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_core.testing.openers import disk
store, me = disk(sys.argv[1], "600"), sys.argv[2]
entries = [entry_for(f"{me} {i}", compile_seconds=0.001) for i in range(300)]
print("ready", flush=True)
sys.stdin.readline()
took = []
for entry in entries:
    began = time.perf_counter()
    store.put(entry)
    took.append(time.perf_counter() - began)
print(json.dumps({"took": took, "waits": store.lock_waits_seconds}))
"""


def test_many_small_entries_of_many_processes_do_not_queue(tmp_path: Path) -> None:
    """A18: four processes, 300 small entries each, the limit reached half-way."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _SMALL, str(tmp_path / "root"), str(i)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for i in range(4)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    results = [json.loads(worker.communicate(timeout=100)[0]) for worker in workers]
    took = sorted(seconds for result in results for seconds in result["took"])
    waits = sorted(seconds for result in results for seconds in result["waits"])
    shown = {"put": took, "lock wait": waits}
    for name, seconds in shown.items():
        median, p99 = statistics.median(seconds), seconds[int(len(seconds) * 0.99)]
        print(f"{name}: median {median * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, longest {seconds[-1] * 1e3:.1f} ms")
    assert waits[int(len(waits) * 0.99)] < 0.05
    assert _open(tmp_path / "root").gc().entries <= 600


def test_readers_meet_no_half_entry_while_writers_work(tmp_path: Path) -> None:
    """Gets, lists and checks against a process that writes, deletes and writes again."""
    root = tmp_path / "root"
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        store = _open(root)
        try:
            while not stop.is_set():
                for i in range(3):
                    stored = store.get(key_for(f"moving {i}"))
                    assert stored is None or stored.entry.header.producer == "testing 1"
                assert store.verify(repair=True).bad == []
                list(store.iterate())
        except (AssertionError, StoreError) as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    writer = _open(root)
    for i in range(120):
        entry = entry_for(f"moving {i % 3}", size_bytes=300_000)
        assert writer.put(entry).status is PutStatus.CREATED
        assert writer.delete(entry.key)
    stop.set()
    for reader in readers:
        reader.join(30)
    assert failures == []
