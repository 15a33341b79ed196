"""The index in SQLite."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtpu_cache_core.errors import StoreError, StoreUnavailable
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key, KeyPrefix, Namespace
from torchtpu_cache_server.index.base import IndexCorrupt, IndexTotals, Record, charged_bytes
from torchtpu_cache_server.index.sqlite import SqliteIndex

_NS = Namespace("default")


def _key(i: int) -> Key:
    return Key(f"ttc1-{i:064x}")


def _record(i: int, *, size: int = 10_000, seconds: float = 1.0, namespace: Namespace = _NS, **more: object) -> Record:
    manifest = Manifest(
        namespace=namespace,
        key=_key(i),
        generation=1,
        digest=Digest(f"{i:064x}"),
        size_bytes=size,
        writer="local",
        created_seconds=1.0,
    )
    fields = {"executable_bytes": 5, "created_seconds": 2.0, "accessed_seconds": 3.0, "target_name": "cpu"} | more
    return Record(manifest=manifest, compile_seconds=seconds, **fields)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


@pytest.fixture
def index(path: Path) -> Iterator[SqliteIndex]:
    opened = SqliteIndex(path)
    yield opened
    opened.close()


def test_records_come_back(index: SqliteIndex) -> None:
    assert index.lookup(_NS, _key(1)) is None
    index.record(_record(1))
    assert index.lookup(_NS, _key(1)) == _record(1)
    assert index.lookup(Namespace("other"), _key(1)) is None
    assert index.lookup_many(_NS, [_key(i) for i in range(1200)]) == {_key(1): _record(1)}
    assert index.remove(_NS, _key(1))
    assert not index.remove(_NS, _key(1))
    assert index.lookup(_NS, _key(1)) is None


def test_replacing_keeps_the_pin_and_the_later_use(index: SqliteIndex) -> None:
    index.record(_record(1, pinned=True, accessed_seconds=50.0))
    index.record(_record(1, size=20_000))
    found = index.lookup(_NS, _key(1))
    assert found is not None
    assert (found.pinned, found.accessed_seconds, found.manifest.size_bytes) == (True, 50.0, 20_000)
    assert index.totals() == IndexTotals(1, charged_bytes(20_000))


def test_totals_follow(index: SqliteIndex, path: Path) -> None:
    for i in range(5):
        index.record(_record(i, namespace=Namespace("a" if i % 2 else "b")))
    index.remove(Namespace("b"), _key(0))
    each = charged_bytes(10_000)
    assert each == 12_288 + 4096
    assert index.totals() == IndexTotals(4, 4 * each)
    assert index.totals(Namespace("a")) == index.totals(Namespace("b")) == IndexTotals(2, 2 * each)
    index.close()
    again = SqliteIndex(path)
    assert again.totals() == IndexTotals(4, 4 * each)
    again.close()


def test_totals_are_what_counting_gives(index: SqliteIndex, path: Path) -> None:
    chance = random.Random(7)
    namespaces = [Namespace("a"), Namespace("b")]
    for _ in range(300):
        number, namespace = chance.randrange(8), chance.choice(namespaces)
        if chance.random() < 0.6:
            index.record(_record(number, namespace=namespace, size=chance.randrange(1, 50_000)))
        else:
            index.remove(namespace, _key(number))
        of = "SELECT count(*), ifnull(sum(charged_bytes), 0) FROM entries"
        assert index.totals() == IndexTotals(*index._writer.execute(of).fetchone())
        for name in namespaces:
            counted = index._writer.execute(f"{of} WHERE namespace = ?", (name,)).fetchone()
            assert index.totals(name) == IndexTotals(*counted)


def test_what_fails_is_not_counted(index: SqliteIndex) -> None:
    index.record(_record(1))
    index._writer.execute("CREATE TEMP TRIGGER no BEFORE INSERT ON totals BEGIN SELECT RAISE(ABORT, 'no'); END")
    changes: list[Callable[[], object]] = [lambda: index.record(_record(2)), lambda: index.remove(_NS, _key(1))]
    for change in changes:
        with pytest.raises(StoreError):
            change()
        assert index.totals() == index.totals(_NS) == IndexTotals(1, charged_bytes(10_000))
    assert index.lookup(_NS, _key(1)) is not None
    assert index.lookup(_NS, _key(2)) is None


@pytest.mark.parametrize("damage", ["entries = 'many'", "charged_bytes = -1", "entries = 0"])
def test_an_index_that_cannot_have_counted_so_is_set_aside(index: SqliteIndex, path: Path, damage: str) -> None:
    index.record(_record(1))
    index._writer.execute(f"UPDATE totals SET {damage}")
    index.close()
    again = SqliteIndex(path)
    assert (again.complete, again.totals()) == (False, IndexTotals(0, 0))
    again.close()


def test_a_start_does_not_read_the_entries(index: SqliteIndex, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1000):
        index.record(_record(number))
    index.close()
    steps: list[None] = []

    class Counted(sqlite3.Connection):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.set_progress_handler(lambda: steps.append(None), 10)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, factory=Counted, **k))
    again = SqliteIndex(path)
    assert again.totals().entries == 1000
    assert len(steps) < 100  # tens of machine steps; one entry takes several
    again.close()


def test_pages_are_in_order_and_filtered(index: SqliteIndex) -> None:
    for i in reversed(range(10)):
        index.record(_record(i, target_name="cpu" if i % 2 else "TPU v5 lite 2x2"))
    assert [r.manifest.key for r in index.page(_NS, limit=3)] == [_key(0), _key(1), _key(2)]
    assert [r.manifest.key for r in index.page(_NS, after=_key(7), limit=3)] == [_key(8), _key(9)]
    assert [r.manifest.key for r in index.page(_NS, limit=9, prefix=KeyPrefix(_key(4)))] == [_key(4)]
    assert [r.manifest.key for r in index.page(_NS, limit=9, prefix=KeyPrefix("ttc1-" + "0" * 63))] == [
        _key(i) for i in range(9)
    ]
    assert [r.manifest.key for r in index.page(_NS, limit=9, prefix=KeyPrefix(_key(4).hexdigest))] == [_key(4)]
    assert len(index.page(_NS, limit=9, target="cpu")) == 5
    assert index.names(None, 2) == [(_NS, _key(0)), (_NS, _key(1))]
    assert index.names((_NS, _key(8)), 5) == [(_NS, _key(9))]


def test_references_count_over_namespaces(index: SqliteIndex) -> None:
    index.record(_record(1))
    index.record(_record(1, namespace=Namespace("other")))
    assert index.references(Digest(f"{1:064x}")) == 2
    assert index.references(Digest(f"{2:064x}")) == 0


def _victims(index: SqliteIndex, limit: int, now_seconds: float) -> list[Key]:
    return [record.manifest.key for record in index.victims(limit, now_seconds)]


def test_victims_save_the_least_per_byte(index: SqliteIndex) -> None:
    index.record(_record(1, seconds=100.0))
    index.record(_record(2, seconds=1.0))
    index.record(_record(3, seconds=1.0, size=100_000))
    index.record(_record(4, seconds=0.0, pinned=True))
    index.record(_record(5, seconds=0.0))
    assert _victims(index, 9, 10.0) == [_key(5), _key(3), _key(2), _key(1)]
    assert _victims(index, 2, 10.0) == [_key(5), _key(3)]
    assert _victims(index, 0, 10.0) == []


def test_of_equals_the_longest_unused_goes_first(index: SqliteIndex) -> None:
    for i in range(9):
        index.record(_record(i, seconds=1.0 if i % 2 else 0.0, accessed_seconds=float((i * 5) % 9)))
    free, dear = ([k for k in range(9) if k % 2 == odd] for odd in (0, 1))
    by_use = [sorted(keys, key=lambda k: (k * 5) % 9) for keys in (free, dear)]
    assert _victims(index, 9, 10.0) == [_key(k) for k in (*by_use[0], *by_use[1])]
    assert _victims(index, 3, 10.0) == [_key(k) for k in by_use[0][:3]]


def test_what_is_long_unused_is_overtaken(index: SqliteIndex) -> None:
    """A dear entry that nobody uses goes in the end, though only cheap ones come in."""
    index.record(_record(0, seconds=20.0, accessed_seconds=61.0))
    for hours in range(1, 50):
        index.record(_record(hours, seconds=1.0, accessed_seconds=hours * 3600.0))
        [victim] = index.victims(1, hours * 3600.0)
        index.remove(*victim.name)
        if victim.manifest.key == _key(0):
            break
    assert 15 <= hours <= 29  # twenty times the gain, told within a factor of the square root of two


def test_a_use_rescues(index: SqliteIndex) -> None:
    for i in range(3):
        index.record(_record(i))
    index.touch({(_NS, _key(0)): 9999.0, (_NS, _key(77)): 9999.0})
    assert _victims(index, 3, 9999.0)[-1] == _key(0)
    found = index.lookup(_NS, _key(0))
    assert found is not None
    assert found.accessed_seconds == 9999.0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_first_use_a_minute_after_the_store_counts_four_times(index: SqliteIndex, replaced: bool) -> None:
    index.record(_record(0, seconds=1.0, accessed_seconds=3.0))
    index.record(_record(1, seconds=3.0, accessed_seconds=3.0))
    assert _victims(index, 1, 70.0) == [_key(0)]
    index.touch({(_NS, _key(0)): 59.0})
    assert _victims(index, 1, 70.0) == [_key(0)]
    index.touch({(_NS, _key(0)): 61.0})
    if replaced:
        index.record(_record(0, seconds=1.0, accessed_seconds=3.0))
    assert _victims(index, 1, 70.0) == [_key(1)]
    index.touch({(_NS, _key(0)): 5.0})
    assert _victims(index, 1, 70.0) == [_key(1)]


@pytest.mark.parametrize("column", ["gain_class", "accessed_seconds"])
def test_victims_of_a_damaged_index_are_none(index: SqliteIndex, path: Path, column: str) -> None:
    index.record(_record(1))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"UPDATE entries SET {column} = 'no number'")
        connection.commit()
    with pytest.raises(IndexCorrupt):
        index.victims(1, 10.0)


def test_an_index_of_an_older_version_begins_anew(path: Path) -> None:
    index = SqliteIndex(path)
    index.record(_record(1))
    index.set_complete(True)
    index.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1")
        connection.execute("ALTER TABLE entries DROP COLUMN class_used_again")
    index = SqliteIndex(path)
    assert (index.complete, index.totals()) == (False, IndexTotals(0, 0))
    index.record(_record(1))
    assert _victims(index, 1, 1.0) == [_key(1)]
    index.close()


def test_complete_survives_only_a_clean_end(path: Path) -> None:
    index = SqliteIndex(path)
    assert not index.complete
    index.set_complete(True)
    index.close()
    index.close()
    with pytest.raises(StoreUnavailable):
        index.lookup(_NS, _key(1))
    second = SqliteIndex(path)
    assert second.complete
    copy = path.with_name("copy.sqlite")
    for suffix in ("", "-wal"):  # what a crash of the second would leave
        copy.with_name(copy.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    second.close()
    third = SqliteIndex(copy)
    assert not third.complete
    third.close()


def test_an_older_file_is_not_believed(path: Path) -> None:
    """One that a power cut has left without its log, or that somebody brought back from a copy."""
    index = SqliteIndex(path)
    index.record(_record(1))
    index.set_complete(True)
    index.close()
    older = path.read_bytes()
    second = SqliteIndex(path)
    second.remove(_NS, _key(1))
    without_log = path.with_name("cut.sqlite")
    without_log.write_bytes(path.read_bytes())
    second.close()
    path.write_bytes(older)
    for opened in (SqliteIndex(path), SqliteIndex(without_log)):
        assert opened.lookup(_NS, _key(1)) == _record(1)
        assert not opened.complete
        opened.close()


def test_a_record_under_another_name_is_damage(index: SqliteIndex) -> None:
    index.record(_record(1))
    index._writer.execute("UPDATE entries SET key = ?", (_key(2),))
    with pytest.raises(IndexCorrupt):
        index.lookup(_NS, _key(2))
    with pytest.raises(IndexCorrupt):
        index.lookup_many(_NS, [_key(2)])


@pytest.mark.parametrize("content", [b"garbage" * 1000, bytes(8192), b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_bad_file_is_set_aside(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    index = SqliteIndex(path)
    assert not index.complete
    index.record(_record(1))
    assert index.lookup(_NS, _key(1)) == _record(1)
    index.close()
    damaged = path.with_name("index.sqlite.damaged")
    assert content == bytes(8192) or damaged.read_bytes() == content


def test_a_file_of_a_newer_version_is_set_aside(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    index = SqliteIndex(path)
    index.record(_record(1))
    index.close()
    assert path.with_name("index.sqlite.damaged").exists()


def test_a_fact_that_cannot_be_decoded_is_damage(path: Path) -> None:
    index = SqliteIndex(path)
    index.set_complete(True)
    index.close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE facts SET value = CAST(x'ff' AS TEXT)")
    with contextlib.closing(SqliteIndex(path)) as index:
        assert not index.complete
        index.record(_record(2))
        assert index.lookup(_NS, _key(2)) == _record(2)


def test_a_name_that_cannot_be_decoded_is_damage(index: SqliteIndex) -> None:
    index.record(_record(1))
    index._writer.execute("UPDATE entries SET key = CAST(x'ff' AS TEXT)")
    with pytest.raises(IndexCorrupt):
        index.names(None, 10)
    index.reset()
    index.record(_record(2))
    assert index.names(None, 10) == [(_NS, _key(2))]


def test_a_schema_that_sqlite_cannot_even_quote_is_damage(path: Path) -> None:
    index = SqliteIndex(path)
    index.set_complete(True)
    index.close()
    raw = path.read_bytes()
    # The name of a table, and its statement.
    damaged = raw.replace(b"tableentriesentries", b"table\xe5ntriesentries").replace(b"CREATE TABLE", b"CREATE TABEL")
    assert damaged != raw
    path.write_bytes(damaged)
    with contextlib.closing(SqliteIndex(path)) as index:
        assert not index.complete
        index.record(_record(2))
        assert index.lookup(_NS, _key(2)) == _record(2)
    assert path.with_name("index.sqlite.damaged").exists()


@pytest.mark.parametrize("damage", ["DROP TABLE entries", "DROP TABLE totals", "DROP TABLE facts", "DELETE FROM facts"])
def test_a_file_without_its_tables_is_set_aside(path: Path, damage: str) -> None:
    """A damaged page may hold nothing but a table's name."""
    index = SqliteIndex(path)
    index.set_complete(True)
    index.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(damage)
    index = SqliteIndex(path)
    assert not index.complete
    index.record(_record(1))
    assert index.lookup(_NS, _key(1)) == _record(1)
    index.check()
    index._writer.execute(damage)
    with pytest.raises(IndexCorrupt):
        index.check()
        index.record(_record(2))
    index.reset()
    index.check()
    index.close()
    assert path.with_name("index.sqlite.damaged").exists()


def test_damage_while_open_is_told_and_mended(index: SqliteIndex, path: Path) -> None:
    index.set_complete(True)
    index.record(_record(1))
    index._writer.execute("UPDATE entries SET manifest = x'00'")
    with pytest.raises(IndexCorrupt):
        index.lookup(_NS, _key(1))
    index.reset()
    assert not index.complete
    assert index.totals() == IndexTotals(0, 0)
    index.record(_record(2))
    assert index.lookup(_NS, _key(2)) == _record(2)


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        SqliteIndex(tmp_path / "nowhere" / "index.sqlite")


def test_check_writes_and_reads(index: SqliteIndex) -> None:
    index.check()
    index.check()


def test_many_threads(index: SqliteIndex) -> None:
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(thread * 100, thread * 100 + 25):
                index.record(_record(i))
                assert index.lookup(_NS, _key(i)) is not None
                index.page(_NS, limit=10)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert index.totals().entries == 150
