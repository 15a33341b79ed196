"""A disk that is full, read-only, without inodes, slow or broken, and a cache folder that goes away under a job.

Method. Real faults on real file systems: tmpfs mounts of a few MB, filled to the last byte or inode by others or
remounted read-only, and ext4 on a loop device that loses its end, so that reads fail with EIO. Where this process may
not mount, that is said, and is a failure in CI. Beside them every call of the disk tier fails in turn (`FaultyFiles`),
and a layer makes each of them slow.

A node asks for programs that nobody has, and a second one, as another process would, for what was stored before. Every
answer is compared byte by byte with what the compiler makes; the compiler takes no time, so what an answer takes is
what the cache adds to it. What was asked for under a fault is either stored or counted as a failure, and a failure is
never counted as a miss. Then the fault ends, nobody touches anything, and the same node must store, and a new one must
find. What the service's disk does to it is another drill (`service_disk`), and so are clocks (`clock_jumps`).

Excluded: a disk whose calls never return (a dead network mount): whatever runs on it hangs, and a call of the operating
system cannot be given up. Loss of power.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from support.clean import clean_folder
from support.figures import Figure, Size
from support.mounts import MountRefused, broken_disk, tmpfs
from support.rig import Rig, median_or_nan, private, program, rigged
from torchtpu_cache.counters import Tier
from torchtpu_cache.gate import CREDIT_SECONDS, SHARE
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles

ADDED_MS: Final = 50.0
"""Per program. A disk that is well takes well under 5 ms."""

KNOWN: Final = 8
CALLS: Final = (
    *("open", "read", "write", "pwrite", "fsync", "fstat", "lstat", "statvfs", "listdir", "mkdir", "link", "unlink"),
    *("utime", "flock", "truncate", "close"),
)

Broken = Callable[[], AbstractContextManager[object]]


@dataclass(slots=True)
class Tally:
    """What all nodes came to."""

    answers: int = 0
    lost: int = 0
    wrong: int = 0
    faults: int = 0
    taken_for_misses: list[str] = field(default_factory=list)
    unaccounted: list[str] = field(default_factory=list)
    asked: int = 0

    def add(self, *rigs: Rig) -> None:
        for rig in rigs:
            self.answers += rig.answers
            self.lost += rig.lost
            self.wrong += rig.wrong

    def figures(self) -> Iterator[Figure]:
        yield Figure.none_of("disk_faults.lost_compiles", self.lost, self.answers)
        yield Figure.none_of("disk_faults.wrong_bytes", self.wrong, self.answers)
        named = self.taken_for_misses
        yield Figure.none_of("disk_faults.failures_taken_for_misses", len(named), self.faults, names=named)
        named = self.unaccounted
        yield Figure.none_of("disk_faults.neither_stored_nor_counted", len(named), self.asked, names=named)


def run(size: Size) -> Iterator[Figure]:
    tally = Tally()
    with clean_folder(in_memory=True) as folder:
        try:
            yield from _mounted(folder, tally, size)
        except MountRefused as refused:
            more = {"capability: mount": str(refused)}
            yield Figure("disk_faults.mounts", 0, "count", ">= 1", os.environ.get("CI") != "true", more)
        yield from _failing_calls(folder, tally, size)
        yield from _slow(folder, tally, size)
        yield from _folder_removed(folder, tally)
        yield from tally.figures()


def _mounted(folder: Path, tally: Tally, size: Size) -> Iterator[Figure]:
    """Faults of whole file systems."""
    with tmpfs(folder / "full", size_bytes=8 << 20) as mount:
        yield from _suffer("full", mount.folder, tally, size, _until(mount.fill, mount.give_back))
    with tmpfs(folder / "full-own", size_bytes=8 << 20) as mount:
        # The tier's own limit is far beyond the disk: it must make room among its own entries.
        yield from _suffer("full_of_our_own", mount.folder, tally, size, partial(_overfilled, mount.folder, tally))
    with tmpfs(folder / "inodes", size_bytes=64 << 20, inodes=900) as mount:
        yield from _suffer("no_inodes", mount.folder, tally, size, _until(mount.take_inodes, mount.give_back))
    with tmpfs(folder / "ro", size_bytes=64 << 20) as mount:
        breaks = _until(partial(mount.set_read_only, True), partial(mount.set_read_only, False))
        yield from _suffer("read_only", mount.folder, tally, size, breaks)
    with broken_disk(folder / "broken", size_bytes=48 << 20) as disk:
        yield from _unreadable(disk.folder, tally, partial(disk.broken, 24 << 20))


def _until(begin: Callable[[], None], end: Callable[[], None]) -> Broken:
    @contextmanager
    def breaks() -> Iterator[None]:
        begin()
        try:
            yield
        finally:
            end()

    return breaks


@contextmanager
def _overfilled(folder: Path, tally: Tally) -> Iterator[None]:
    """Another process of ours has filled the disk with entries."""
    with rigged(folder, memory=True, executable_bytes=100_000) as other:
        for number in range(90):
            other.ask(program(f"other's {number}"))
        other.settle()
        tally.add(other)
    yield


# ---- one fault -------------------------------------------------------------------------------------------------------


def _suffer(
    name: str, folder: Path, tally: Tally, size: Size, broken: Broken, *, files: Files | None = None
) -> Iterator[Figure]:
    """A node that stores and another that reads, before, under and after a fault."""
    options: dict[str, Any] = {"memory": True} | ({} if files is None else {"files": files})
    asked = [f"{name} {i}" for i in range(size.of(30, 300))]
    with ExitStack() as stack:
        node = stack.enter_context(rigged(folder, **options))
        for number in range(KNOWN):
            node.ask(program(f"{name} known {number}"))
        node.settle()
        reader = stack.enter_context(rigged(folder, **options))
        before = _stored(node)
        with broken():
            taken = [node.ask(program(each))[0] for each in asked]
            taken += [reader.ask(program(f"{name} known {i}"))[0] for i in range(KNOWN)]
            node.settle()
            reader.settle()
        _account(name, node, _stored(node) - before, len(asked), tally)
        again = [f"{name} again {i}" for i in range(10)]
        for each in again:
            node.ask(program(each))
        node.settle()
        tally.add(node, reader)
        failures = node.totals()["failures"] | {f"reader.{k}": n for k, n in reader.totals()["failures"].items()}
    worst = {"worst": round(max(taken), 2), "of": len(taken), "failures": failures}
    yield Figure.at_most(f"disk_faults.{name}.adds", median_or_nan(taken), "ms", ADDED_MS, **worst)
    yield from _found(name, folder, again, tally)


def _stored(rig: Rig) -> int:
    assert rig.disk is not None
    return rig.disk.created


def _account(name: str, node: Rig, stored: int, asked: int, tally: Tally) -> None:
    """What was asked for was stored, perhaps to go soon, or its failure was counted."""
    totals = node.totals()
    counted = sum(count for failure, count in totals["failures"].items() if failure.startswith("disk."))
    skipped = sum(count for why, count in totals["skipped"].items() if why.startswith("disk."))
    tally.asked += asked
    if stored + counted + skipped < asked:
        tally.unaccounted.append(f"{name}: {asked} asked, {stored} stored, {counted} failures, {skipped} skipped")


def _found(name: str, folder: Path, stored: list[str], tally: Tally) -> Iterator[Figure]:
    """A new process finds on disk what was stored after the fault."""
    with rigged(folder, memory=True) as fresh:
        tiers = [fresh.ask(program(each))[1] for each in stored]
        tally.add(fresh)
    hits = tiers.count(Tier.DISK)
    yield Figure.at_least(f"disk_faults.{name}.stored_again", hits, f"of {len(stored)}", len(stored))


def _unreadable(folder: Path, tally: Tally, broken: Broken) -> Iterator[Figure]:
    """Entries that lie where the disk cannot be read: failures, and no misses."""
    known = [f"unreadable {i}" for i in range(60)]
    with ExitStack() as stack:
        node = stack.enter_context(rigged(folder, memory=True, executable_bytes=300_000))
        for each in known:
            node.ask(program(each))
        node.settle()
        reader = stack.enter_context(rigged(folder, memory=True, executable_bytes=300_000))
        with broken():
            answers = [reader.ask(program(each)) for each in known]
        totals = reader.totals()
        tally.faults += 1
        if totals["tier_misses"].get("disk"):
            tally.taken_for_misses.append("unreadable")
        tally.add(node, reader)
    failed = totals["failures"].get("disk.io", 0)
    more = {"hits": totals["hits"].get("disk", 0), "failures": totals["failures"]}
    yield Figure.at_least("disk_faults.unreadable.struck", failed, "count", 1, **more)
    yield Figure.at_most("disk_faults.unreadable.adds", median_or_nan(ms for ms, _ in answers), "ms", ADDED_MS)
    # Once the disk can be read again, the same entries are hits again.
    with rigged(folder, memory=True, executable_bytes=300_000) as fresh:
        hits = sum(fresh.ask(program(each))[1] is Tier.DISK for each in known)
        tally.add(fresh)
    yield Figure.at_least("disk_faults.unreadable.hits_again", hits, f"of {len(known)}", len(known))


# ---- every call ------------------------------------------------------------------------------------------------------


def _failing_calls(folder: Path, tally: Tally, size: Size) -> Iterator[Figure]:
    """Each call of the operating system fails for a while, under both nodes."""
    worst, taken, missing = ("", 0.0), [], []
    for number in (errno.EIO,) if size is Size.SHORT else (errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE):
        for call in CALLS:
            name = f"{call}-{errno.errorcode[number]}"
            found = _failing_call(name, private(folder / name), Fault(call=call, error=number), tally, size)
            taken += found
            worst = max(worst, (name, max(found)), key=lambda each: each[1])
            hits = next(iter(_found(name, folder / name, [f"{name} again {i}" for i in range(3)], tally)))
            missing += [] if hits.ok else [name]
    more = {"worst": round(worst[1], 2), "worst_call": worst[0], "of": len(taken)}
    yield Figure.at_most("disk_faults.failing_call.adds", median_or_nan(taken), "ms", ADDED_MS, **more)
    yield Figure.none_of("disk_faults.failing_call.not_stored_again", len(missing), len(CALLS), names=missing)


def _failing_call(name: str, folder: Path, fault: Fault, tally: Tally, size: Size) -> list[float]:
    files = FaultyFiles()
    with ExitStack() as stack:
        node = stack.enter_context(rigged(folder, memory=True, files=files))
        for number in range(KNOWN):
            node.ask(program(f"{name} known {number}"))
        node.settle()
        reader = stack.enter_context(rigged(folder, memory=True, files=files))
        asked = [f"{name} {i}" for i in range(size.of(4, 40))]
        before = _stored(node)
        with files.failing(fault):
            taken = [node.ask(program(each))[0] for each in asked]
            taken += [reader.ask(program(f"{name} known {i}"))[0] for i in range(KNOWN)]
            node.settle()
            reader.settle()
        tally.faults += 1
        # A full disk makes the node evict what the reader asks for.
        if fault.error != errno.ENOSPC and reader.totals()["tier_misses"].get("disk"):
            tally.taken_for_misses.append(name)
        _account(name, node, _stored(node) - before, len(asked), tally)
        for number in range(3):
            node.ask(program(f"{name} again {number}"))
        node.settle()
        tally.add(node, reader)
    return taken


# ---- slow ------------------------------------------------------------------------------------------------------------


class SlowFiles(Files):
    """Each call takes `seconds` longer."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name in CALLS or name == "rename":
            return partial(self._late, found)
        return found

    def _late(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        time.sleep(self.seconds)
        return call(*arguments, **options)


def _slow(folder: Path, tally: Tally, size: Size) -> Iterator[Figure]:
    """Writes are not waited for; look-ups are, as long as that pays."""
    for late_seconds in (0.25,) if size is Size.SHORT else (0.02, 0.1, 0.5):
        name, files, count = f"slow_by_{late_seconds * 1000:.0f}ms", SlowFiles(), size.of(16, 100)
        home = private(folder / name)
        with ExitStack() as stack:
            node = stack.enter_context(rigged(home, memory=True, files=files))
            for number in range(KNOWN):
                node.ask(program(f"{name} known {number}"))
            node.settle()
            reader = stack.enter_context(rigged(home, memory=True, files=files))
            files.seconds = late_seconds
            added = sum(node.ask(program(f"{name} {i}"))[0] for i in range(count)) / 1000
            hits = sum(reader.ask(program(f"{name} known {i}"))[1] is Tier.DISK for i in range(KNOWN))
            files.seconds = 0.0
            totals = node.totals()
            again = [f"{name} again {i}" for i in range(5)]
            for each in again:
                node.ask(program(each))
            node.settle()
            tally.add(node, reader)
        # The last that is asked may overdraw; the rest is what each takes without a fault.
        bar = CREDIT_SECONDS + SHARE * totals["compile_seconds"] + late_seconds + 0.01 * count
        more = {"programs": count, "skipped": totals["skipped"]}
        yield Figure.at_most(f"disk_faults.{name}.lookups_add", added, "s", round(bar, 2), **more)
        yield Figure.at_least(f"disk_faults.{name}.hits", hits, f"of {KNOWN}", 1)
        yield from _found(name, home, again, tally)


# ---- gone ------------------------------------------------------------------------------------------------------------


def _folder_removed(folder: Path, tally: Tally) -> Iterator[Figure]:
    """The whole cache folder is removed, or replaced by a file, under a node at work."""
    home = private(folder / "removed")
    with rigged(home, memory=True) as node:
        for number in range(KNOWN):
            node.ask(program(f"removed known {number}"))
        node.settle()
        shutil.rmtree(home)
        taken = [node.ask(program(f"removed {i}"))[0] for i in range(20)]
        node.settle()
        shutil.rmtree(home, ignore_errors=True)
        home.write_bytes(b"a file where the folder was")
        taken += [node.ask(program(f"replaced {i}"))[0] for i in range(20)]
        node.settle()
        replaced = node.totals()["failures"]
        home.unlink()
        again = [f"removed again {i}" for i in range(10)]
        for each in again:
            node.ask(program(each))
        node.settle()
        tally.add(node)
    more = {"worst": round(max(taken), 2), "failures": replaced}
    yield Figure.at_most("disk_faults.folder_removed.adds", median_or_nan(taken), "ms", ADDED_MS, **more)
    yield from _found("folder_removed", home, again, tally)
