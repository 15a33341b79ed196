"""A service whose data folder is full, read-only or out of inodes.

Reads go on; puts are answered with a problem (507 or 503) unless an eviction makes room, and a client goes on; deletes
free room even on a disk that others filled to the last byte; when the fault ends, puts work without a restart. A
service that starts under the fault starts, says so in one sentence, and serves what is there. A disk under a service
that has files open cannot be made read-only from outside, so that fault begins with the start.

Method. A real service process on a tmpfs of 16 MB, which others fill to the last byte or inode, or which is mounted
anew as read-only. Where this process may not mount, that is said, and is a failure in CI.

Excluded: errors of single reads and writes (EIO), which the unit tests of the bucket bring about call by call.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from support.clean import clean_folder
from support.figures import Figure, Size
from support.mounts import Mount, MountRefused, tmpfs
from support.rig import median_or_nan, private, program, rigged
from support.served import Served, launch
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.testing.entries import entry_for

ADDED_MS: Final = 50.0
STANDING: Final = 12
ROOM_SECONDS: Final = 15.0
"""The service keeps room back again every 5 s; a full remote is offered nothing for 30 s, so puts are by hand here."""

_REFUSED: Final = {507, 503}


def run(size: Size) -> Iterator[Figure]:
    with clean_folder(in_memory=True) as folder:
        try:
            yield from _figures(folder, size)
        except MountRefused as refused:
            more = {"capability: mount": str(refused)}
            yield Figure("service_disk.mounts", 0, "count", ">= 1", os.environ.get("CI") != "true", more)


def _figures(folder: Path, size: Size) -> Iterator[Figure]:
    faults: tuple[tuple[str, int, Callable[[Mount], None], Callable[[Mount], None]], ...] = (
        ("full", 100_000, Mount.fill, Mount.give_back),
        ("no_inodes", 1500, Mount.take_inodes, Mount.give_back),
        ("read_only", 100_000, partial(_remount, True), partial(_remount, False)),
    )
    for name, inodes, begin, end in faults:
        with tmpfs(folder / f"service-{name}", size_bytes=16 << 20, inodes=inodes) as mount:
            yield from _suffer(f"service_disk.{name}", folder, mount, size, begin, end)


def _remount(read_only: bool, mount: Mount) -> None:
    mount.set_read_only(read_only)


def _suffer(
    name: str, folder: Path, mount: Mount, size: Size, begin: Callable[[Mount], None], end: Callable[[Mount], None]
) -> Iterator[Figure]:
    log = folder / f"{name}.log"
    data = mount.folder / "data"
    served = launch(data, log=log)
    standing = [entry_for(f"{name} {i}", size_bytes=200_000) for i in range(STANDING)]
    try:
        stored = [served.put(entry).status for entry in standing]
        assert stored == [201] * STANDING, stored
        if name.endswith("read_only"):
            served.stop()
        begin(mount)
        try:
            if name.endswith("read_only"):
                served = launch(data, log=log)
            reads, puts = _asked(served, name, standing, size.of(10, 40))
            yield from _judged(name, reads, puts)
            yield from _client(name, folder, served)
            yield from _deletes(name, served, standing)
            if size is Size.FULL or name.endswith("full"):
                served.stop()
                served = launch(data, log=log)
            yield from _started(name, served, standing, log)
        finally:
            end(mount)
        yield from _recovered(name, served, standing)
    finally:
        served.kill()


def _asked(served: Served, name: str, standing: list[Entry], count: int) -> tuple[Counter[int], Counter[str]]:
    reads: Counter[int] = Counter()
    puts: Counter[str] = Counter()
    for number in range(count):
        reads[_read(served, standing[number % len(standing)])] += 1
        put = served.put(entry_for(f"{name} in vain {number}", size_bytes=50_000))
        puts[f"{put.status} {put.kind}" if put.status in _REFUSED else str(put.status)] += 1
    return reads, puts


def _judged(name: str, reads: Counter[int], puts: Counter[str]) -> Iterator[Figure]:
    tried = sum(reads.values())
    yield Figure.none_of(f"{name}.reads_failed", tried - reads[200] - reads[404], tried, evicted=reads[404])
    # Room may still be made by evicting; whatever else is no refusal of the right kind.
    strange = sum(count for said, count in puts.items() if said != "201" and int(said.split()[0]) not in _REFUSED)
    yield Figure.none_of(f"{name}.puts_answered_otherwise", strange, sum(puts.values()), puts=dict(puts))


def _client(name: str, folder: Path, served: Served) -> Iterator[Figure]:
    """A node before this service: it compiles, and keeps what it could not upload."""
    home = private(folder / f"{name}-client")
    url = f"http://127.0.0.1:{served.port}"
    with rigged(home, url, memory=True) as node:
        taken = [node.ask(program(f"{name} client {i}"))[0] for i in range(20)]
        node.node.flush()
        wrong = node.wrong + node.lost
    yield Figure.at_most(f"{name}.client_adds", median_or_nan(taken), "ms", ADDED_MS, worst=round(max(taken), 2))
    yield Figure.none_of(f"{name}.client_wrong_or_lost", wrong, len(taken))


def _deletes(name: str, served: Served, standing: list[Entry]) -> Iterator[Figure]:
    """Frees room by hand, as an operator would; a read-only disk cannot."""
    key = served.ask("GET", "/v1/default/entries?limit=1").json["entries"][0]["key"]
    answer = served.ask("DELETE", f"/v1/default/entries/{key}")
    expected = 507 if name.endswith("read_only") else 204
    yield Figure.none_of(f"{name}.delete_failed", int(answer.status != expected), 1, status=answer.status)
    if expected == 204:
        standing[:] = [entry for entry in standing if entry.key != key]
        left = served.ask("GET", f"/v1/default/entries/{key}").status
        put = served.put(entry_for(f"{name} after the delete", size_bytes=20_000)).status
        yield Figure.none_of(f"{name}.deleted_entry_served", int(left != 404), 1, put_after_delete=put)


def _started(name: str, served: Served, standing: list[Entry], log: Path) -> Iterator[Figure]:
    """A service that starts under the fault serves, and says what is wrong."""
    found = Counter(_read(served, entry) for entry in standing)
    failed = len(standing) - found[200] - found[404]
    more = {"evicted": found[404], "log": log.read_text()[-300:]}
    yield Figure.none_of(f"{name}.reads_failed_after_start", failed, len(standing), **more)


def _recovered(name: str, served: Served, standing: list[Entry]) -> Iterator[Figure]:
    """Without a restart: puts, reads and deletes work again, and room is kept back again."""
    ended = time.monotonic()
    while True:
        entry = entry_for(f"{name} again", size_bytes=50_000)
        if served.put(entry).status in (200, 201) or time.monotonic() - ended > ROOM_SECONDS:
            break
        time.sleep(0.1)
    seconds = time.monotonic() - ended
    works = served.get(entry).status == 200 and served.ask("DELETE", f"/v1/default/entries/{entry.key}").status == 204
    yield Figure.at_most(f"{name}.puts_work_again", seconds if works else float("nan"), "s", ROOM_SECONDS)
    found = Counter(_read(served, each) for each in standing)
    evicted = found[404] if name.endswith(".full") else 0  # where room was made for what came
    yield Figure.none_of(f"{name}.entries_lost", len(standing) - found[200] - evicted, len(standing), evicted=evicted)


def _read(served: Served, entry: Entry) -> int:
    """The status; -1 where the bytes are not the entry's."""
    answer = served.get(entry)
    return -1 if answer.status == 200 and answer.body != bytes(entry.buffer) else answer.status
