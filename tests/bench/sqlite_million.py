"""A service whose SQLite index holds a million entries, beside one that is all but empty.

Two data folders. Both hold the same hundred real entries, put through HTTP; one index holds a million more (20,000 in
the short form), written through the index's own `record`, many to a transaction. Their blobs and manifests are not
made: nothing that is measured may read them, and nothing does. Each folder was closed cleanly, so that no
reconciliation is due (after a crash one runs in the background while the service serves).

- **ready**: from the start of the process to the line that says that it listens, in interleaved rounds. Before each
  start the index's pages are dropped from the page cache, so that a start which read them all would show it.
- **lookup**: `POST /v1/default/lookup` of one key that is there, drawn at random of all, on one kept connection; the
  99th percentile of each round, medians of interleaved rounds over both services. They reach the index in SQLite,
  whose file is in the page cache by now; nothing of it is in the service's memory beforehand.
- **rss**: the most that the service with a million has had resident (VmHWM) after all of this.

Told beside: how long the million took to write, how large the file is, reads (HEAD) of the hundred real entries, and
a put with and without the eviction of one of the million: the limit of entries is their number, so that each put has
to find the least worthy of them, delete it, and forget it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.client
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support.clean import clean_folder
from support.figures import Figure, Size
from support.load import cpu_seconds
from support.rounds import Rounds, Taken, interleaved
from support.served import Served, launch, path_of
from torchtpu_cache_core import wire
from torchtpu_cache_core.closing import Closing
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.index.base import Record
from torchtpu_cache_server.index.sqlite import SqliteIndex

_REAL = 100
_TRANSACTION = 20_000
_CACHE_KIB = 400_000
_YEAR_SECONDS = 365 * 86_400.0
_RSS_BAR_MB = 200
_MAX_SIZE = "64TB"
"""So that it is the number of entries that makes a put evict."""


def run(size: Size) -> Iterator[Figure]:
    count = size.of(20_000, Limits().limit_entries)
    entries = [entry_for(f"real {number}") for number in range(_REAL)]
    with clean_folder() as folder:
        empty, million = folder / "empty", folder / "million"
        started = time.monotonic()
        for place, more in ((empty, 0), (million, count - _REAL)):
            _put_all(place, entries)
            _fill(place / "index.sqlite", more)
        yield Figure.told(
            "sqlite_million.written",
            time.monotonic() - started,
            "s",
            entries=count,
            file_mb=round((million / "index.sqlite").stat().st_size / 1e6),
        )
        ready = interleaved(
            size.of(2, 9),
            {"empty": lambda: _time_to_ready(empty), "million": lambda: _time_to_ready(million)},
            warm=size.of(0, 1),
        )
        yield Figure.at_most(
            "sqlite_million.ready", ready.ratio("million", "empty"), "ratio", 1.2, **ready.told("million", "empty")
        )
        for place in (empty, million):
            _bring_into_page_cache(place / "index.sqlite")
        with (
            _serving(empty) as small,
            _serving(million) as large,
            _Talk(small, entries) as to_small,
            _Talk(large, entries, _keys(count - _REAL)) as to_large,
        ):
            talks = {"empty": to_small, "million": to_large}
            yield from _lookups(talks, rounds=size.of(2, 11), asks=size.of(200, 1000))
            yield _reads(talks, rounds=size.of(2, 11), asks=size.of(100, 500))
            yield _puts(talks, puts=size.of(10, 100))
            most_bytes = large.resident_bytes()[1]
            yield Figure.at_most(
                "sqlite_million.rss",
                most_bytes / 1e6,
                "MB",
                _RSS_BAR_MB,
                entries=count,
                empty_mb=round(small.resident_bytes()[1] / 1e6, 1),
            )


class _Talk(Closing):
    """One kept connection to one of the services."""

    def __init__(self, served: Served, entries: list[Entry], more: list[Key] | None = None) -> None:
        self._pid = served.process.pid
        self._connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
        self._entries = entries
        self._keys = [entry.key for entry in entries] + (more or [])
        self._random = random.Random(3)

    def close(self) -> None:
        self._connection.close()

    def seconds_to_look_up(self) -> float:
        key = self._random.choice(self._keys)
        body = json.dumps(wire.lookup_request([key])).encode()
        seconds, status, answer = self._ask("POST", "/v1/default/lookup", body)
        assert status == 200
        assert list(json.loads(answer)["found"]) == [key]
        return seconds

    def seconds_to_head(self) -> float:
        seconds, status, _ = self._ask("HEAD", path_of(self._random.choice(self._entries)))
        assert status == 200
        return seconds

    def seconds_to_put(self, entry: Entry) -> float:
        digest = {"Content-Digest": wire.content_digest(entry.digest)}
        seconds, status, _ = self._ask("PUT", path_of(entry), bytes(entry.buffer), digest)
        assert status == 201
        return seconds

    def cpu_seconds(self) -> float:
        """That the service has run."""
        return cpu_seconds(self._pid)

    def entries(self) -> int:
        return int(json.loads(self._ask("GET", "/v1/default/stats")[2])["entries"])

    def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[float, int, bytes]:
        started = time.perf_counter()
        self._connection.request(method, path, body, headers or {})
        answer = self._connection.getresponse()
        content = answer.read()
        return time.perf_counter() - started, answer.status, content


def _lookups(talks: dict[str, _Talk], *, rounds: int, asks: int) -> Iterator[Figure]:
    high: dict[str, list[Taken]] = {way: [] for way in talks}
    middle: dict[str, list[Taken]] = {way: [] for way in talks}
    for number in range(-1, rounds):
        for way, talk in talks.items():
            before = talk.cpu_seconds()
            seconds = [talk.seconds_to_look_up() for _ in range(asks)]
            cpu_seconds = (talk.cpu_seconds() - before) / asks
            if number >= 0:
                high[way].append(Taken(statistics.quantiles(seconds, n=100)[98]))
                middle[way].append(Taken(statistics.median(seconds), cpu_seconds))
    of_high, of_middle = Rounds(high), Rounds(middle)
    ratio, told = of_high.ratio("million", "empty"), of_high.told("million", "empty")
    yield Figure.at_most("sqlite_million.lookup_p99", ratio, "ratio", 2.0, asks=asks, **told)
    ratio, told = of_middle.ratio("million", "empty"), of_middle.told("million", "empty")
    yield Figure.told("sqlite_million.lookup_p50", ratio, "ratio", **told)


def _reads(talks: dict[str, _Talk], *, rounds: int, asks: int) -> Figure:
    def median(talk: _Talk) -> Taken:
        return Taken(statistics.median(talk.seconds_to_head() for _ in range(asks)))

    ways = {way: functools.partial(median, talk) for way, talk in talks.items()}
    measured = interleaved(rounds, ways)
    told = measured.told("million", "empty")
    return Figure.told("sqlite_million.head", measured.ratio("million", "empty"), "ratio", **told)


def _puts(talks: dict[str, _Talk], *, puts: int) -> Figure:
    before = talks["million"].entries()
    taken: dict[str, list[Taken]] = {way: [] for way in talks}
    for number in range(puts):
        entry = entry_for(f"put {number}")
        for way, talk in talks.items():
            taken[way].append(Taken(talk.seconds_to_put(entry)))
    measured = Rounds(taken)
    return Figure.told(
        "sqlite_million.put",
        measured.ratio("million", "empty"),
        "ratio",
        evicted=before + puts - talks["million"].entries(),
        **measured.told("million", "empty"),
    )


@contextlib.contextmanager
def _serving(place: Path) -> Iterator[Served]:
    served = launch(place, "--max-size", _MAX_SIZE)
    try:
        yield served
    finally:
        served.stop()


def _put_all(place: Path, entries: list[Entry]) -> None:
    with _serving(place) as served:
        for entry in entries:
            assert served.put(entry).status == 201


def _time_to_ready(place: Path) -> Taken:
    """Starts the service on cold pages of its index, and ends it again."""
    with (place / "index.sqlite").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    with _serving(place):
        return Taken(time.perf_counter() - started)


def _bring_into_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass


def _keys(count: int) -> list[Key]:
    """In order, and without an end in common."""
    return [Key(f"ttc1-{number:08x}{hashlib.sha256(b'%d' % number).hexdigest()[8:]}") for number in range(count)]


def _fill(path: Path, count: int) -> None:
    """Records so many entries as if they had been put, over a year, by compiles between a second and ten minutes."""
    index = SqliteIndex(path)
    assert index.complete
    chance = random.Random(5)
    now = time.time()
    keys = _keys(count)
    index._writer.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    for start in range(0, count, _TRANSACTION):
        print(f"  written: {start:,} of {count:,}", file=sys.stderr, flush=True)
        with _one_transaction(index):
            for key in keys[start : start + _TRANSACTION]:
                index.record(_record(key, chance, now))
    index.close()


@contextlib.contextmanager
def _one_transaction(index: SqliteIndex) -> Iterator[None]:
    """All that is recorded in the block becomes one transaction; a million of them would each wait for the disk."""
    with index._writing() as connection:
        index._writing = lambda: contextlib.nullcontext(connection)  # type: ignore[method-assign]
        try:
            yield
        finally:
            del index._writing  # the class's own again


def _record(key: Key, chance: random.Random, now: float) -> Record:
    created_seconds = now - chance.random() * _YEAR_SECONDS
    manifest = Manifest(
        namespace=DEFAULT_NAMESPACE,
        key=key,
        generation=1,
        digest=Digest(hashlib.sha256(key.encode()).hexdigest()),
        size_bytes=chance.randrange(1 << 20, 8 << 20),
        writer="local",
        created_seconds=created_seconds,
    )
    return Record(
        manifest=manifest,
        executable_bytes=manifest.size_bytes * 10,
        compile_seconds=600.0 ** chance.random(),
        created_seconds=created_seconds,
        accessed_seconds=created_seconds + chance.random() * (now - created_seconds),
        target_name="TPU v5 lite x 4",
    )
