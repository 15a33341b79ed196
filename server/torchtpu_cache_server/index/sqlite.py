"""The index in one SQLite file: write-ahead log, one writing connection, a pool of reading ones.

Whether it was complete is told by a note beside it, written by a clean `close` and taken away, for good, by the next
open: the file's own word could be an older one, after a power cut that lost the log or when somebody brought back an
old copy. Note and file hold the same random token; a copy of the file alone meets no note, or another one's.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core.errors import CacheError, FailureKind, StoreError, StoreUnavailable
from torchtpu_cache_core.eviction import AGAIN_SECONDS, is_used_again, least_gain, worth
from torchtpu_cache_core.names import Digest, Key, KeyPrefix, Namespace
from torchtpu_cache_core.stores.failures import translated
from torchtpu_cache_core.stores.files import FILES
from torchtpu_cache_server.index.base import (
    EntryName,
    Index,
    IndexCorrupt,
    IndexTotals,
    Record,
)
from torchtpu_cache_server.index.rows import COLUMNS, only_value, record_of, text_of, totals_of, translated_sqlite
from torchtpu_cache_server.index.schema import CLASSES, SCHEMA, VERSION

_BUSY_SECONDS: Final = 1.0
"""How long a lock of another program is awaited: a person's look into the file, for no process of ours shares it."""

_MAX_READERS: Final = 8
_BATCH: Final = 500
"""Below SQLite's limit of variables in one statement."""


class SqliteIndex(Index):
    """An index in `path`; opening one never fails for what the file holds: a bad one is set aside.

    Raises:
        StoreError: the file cannot be made or opened at all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._note = path.with_name(path.name + ".clean")
        self._lock = threading.RLock()  # guards the writer, the totals and a reset
        self._readers_lock = threading.Lock()  # guards _readers and _era; taken after _lock
        self._readers: list[sqlite3.Connection] = []
        self._era = 0
        self._closed = False
        try:
            self._open()
        except IndexCorrupt:
            self._set_aside()
            self._open()

    def _open(self) -> None:
        token = self._take_note()
        self._writer = self._connect()
        try:
            with translated_sqlite():
                self._make()
                self._complete = token != "" and self._fact("complete") == token
                self._totals = totals_of(self._writer.execute("SELECT entries, charged_bytes FROM totals"))
                has_entries = only_value(self._writer.execute("SELECT EXISTS (SELECT 1 FROM entries)"))
                if has_entries != bool(self._totals.entries):
                    raise IndexCorrupt("the index has counted entries that it has not, or the other way round")
        except BaseException:
            self._writer.close()
            raise

    def _take_note(self) -> str:
        """The token that a clean `close` left, or nothing; a process that dies from now on leaves none."""
        with translated("the index's note could not be taken away"):
            try:
                token = self._note.read_text("ascii", errors="replace")
                self._note.unlink()
            except FileNotFoundError:
                return ""
            FILES.sync_folder(self._note.parent)
        return token

    def _leave_note(self, token: str) -> None:
        with open(self._note, "x", encoding="ascii") as file:
            file.write(token)
            file.flush()
            os.fsync(file.fileno())
        FILES.sync_folder(self._note.parent)

    def _connect(self) -> sqlite3.Connection:
        with translated_sqlite():
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            connection.text_factory = text_of
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # A power cut may lose the last transactions, not the file; the bucket holds the truth.
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA trusted_schema = OFF")
            except BaseException:
                connection.close()
                raise
            return connection

    def _make(self) -> None:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise IndexCorrupt("the index was written by a newer version of the service")
        if version < VERSION:
            # executescript ends an open transaction first, so the script brings its own.
            self._writer.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")

    def _fact(self, name: str) -> Any:
        return only_value(self._writer.execute("SELECT value FROM facts WHERE name = ?", (name,)))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._closed:
                raise StoreUnavailable("the index is closed")
            with translated_sqlite():
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    yield self._writer
                    self._writer.execute("COMMIT")
                except BaseException:
                    # After some errors SQLite has rolled back by itself.
                    if self._writer.in_transaction:
                        self._writer.execute("ROLLBACK")
                    raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._readers_lock:
            if self._closed:
                raise StoreUnavailable("the index is closed")
            era = self._era
            connection = self._readers.pop() if self._readers else None
        if connection is None:
            connection = self._connect()
        try:
            with translated_sqlite():
                yield connection
        finally:
            with self._readers_lock:
                if era == self._era and len(self._readers) < _MAX_READERS:
                    self._readers.append(connection)
                    connection = None
            if connection is not None:
                connection.close()

    @property
    def complete(self) -> bool:
        return self._complete

    def set_complete(self, complete: bool) -> None:
        self._complete = complete

    def lookup(self, namespace: Namespace, key: Key) -> Record | None:
        with self._reading() as connection:
            row = connection.execute(
                f"SELECT {COLUMNS} FROM entries WHERE namespace = ? AND key = ?",  # noqa: S608 - constant columns
                (namespace, key),
            ).fetchone()
        return None if row is None else record_of(row, namespace, key)

    def lookup_many(self, namespace: Namespace, keys: Sequence[Key]) -> dict[Key, Record]:
        found = {}
        with self._reading() as connection:
            for start in range(0, len(keys), _BATCH):
                batch = keys[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                for row in connection.execute(
                    f"SELECT {COLUMNS}, key FROM entries WHERE namespace = ? AND key IN ({marks})",  # noqa: S608
                    (namespace, *batch),
                ):
                    record = record_of(row[:-1], namespace, row[-1])
                    found[record.manifest.key] = record
        return found

    def record(self, record: Record) -> None:
        manifest = record.manifest
        with self._changing(record.manifest.namespace) as (connection, change):
            old = connection.execute(
                "SELECT charged_bytes, accessed_seconds, pinned FROM entries WHERE namespace = ? AND key = ?",
                record.name,
            ).fetchone()
            accessed_seconds = max(record.accessed_seconds, old[1] if old else 0.0)
            connection.execute(
                "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *record.name,
                    manifest.to_bytes(),
                    manifest.digest,
                    manifest.size_bytes,
                    record.charged_bytes,
                    record.executable_bytes,
                    record.compile_seconds,
                    record.created_seconds,
                    accessed_seconds,
                    record.target_name,
                    int(record.pinned or bool(old and old[2])),
                    manifest.created_seconds + AGAIN_SECONDS,
                    record.gain_class(used_again=True),
                    record.gain_class(used_again=is_used_again(manifest.created_seconds, accessed_seconds)),
                ),
            )
            change += (0, record.charged_bytes - old[0]) if old else (1, record.charged_bytes)

    def remove(self, namespace: Namespace, key: Key) -> bool:
        with self._changing(namespace) as (connection, change):
            row = connection.execute(
                "DELETE FROM entries WHERE namespace = ? AND key = ? RETURNING charged_bytes", (namespace, key)
            ).fetchone()
            if row is None:
                return False
            change += (-1, -row[0])
        return True

    @contextlib.contextmanager
    def _changing(self, namespace: Namespace) -> Iterator[tuple[sqlite3.Connection, list[int]]]:
        """A transaction, and a list for what it adds to the namespace's entries and bytes, where it adds anything."""
        change: list[int] = []
        with self._lock:
            with self._writing() as connection:
                yield connection, change
                if change:
                    connection.execute(
                        "INSERT INTO totals VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET"
                        " entries = entries + excluded.entries, charged_bytes = charged_bytes + excluded.charged_bytes",
                        (namespace, *change),
                    )
                    connection.execute("DELETE FROM totals WHERE namespace = ? AND entries = 0", (namespace,))
            # Only now: a transaction that failed has added nothing.
            if change:
                self._totals = totals_of([(self._totals.entries, self._totals.charged_bytes), tuple(change)])

    def touch(self, accessed: Mapping[EntryName, float]) -> None:
        with self._writing() as connection:
            connection.executemany(
                "UPDATE entries SET accessed_seconds = max(accessed_seconds, ?1),"
                " gain_class = iif(?1 >= used_again_seconds, class_used_again, gain_class)"
                " WHERE namespace = ?2 AND key = ?3",
                [(seconds, *name) for name, seconds in accessed.items()],
            )

    def page(
        self,
        namespace: Namespace,
        *,
        after: str = "",
        limit: int,
        prefix: KeyPrefix | None = None,
        target: str | None = None,
    ) -> list[Record]:
        where = "namespace = ? AND key > ?"
        values: list[str | int] = [namespace, after]
        if prefix is not None:
            where += " AND (substr(key, 1, ?) = ? OR substr(key, instr(key, '-') + 1, ?) = ?)"
            values += [len(prefix), prefix] * 2
        if target is not None:
            where += " AND target_name = ?"
            values.append(target)
        with self._reading() as connection:
            rows = connection.execute(
                f"SELECT {COLUMNS} FROM entries WHERE {where} ORDER BY key LIMIT ?",  # noqa: S608 - constant parts
                (*values, limit),
            ).fetchall()
        return [record_of(row) for row in rows]

    def names(self, after: EntryName | None, limit: int) -> list[EntryName]:
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT namespace, key FROM entries WHERE (namespace, key) > (?, ?) ORDER BY namespace, key LIMIT ?",
                (*(after or ("", "")), limit),
            ).fetchall()
        try:
            return [(Namespace(namespace), Key(key)) for namespace, key in rows]
        except CacheError as error:
            raise IndexCorrupt(f"the index holds a name that cannot be: {error}") from error

    def references(self, digest: Digest) -> int:
        with self._reading() as connection:
            return int(connection.execute("SELECT count(*) FROM entries WHERE digest = ?", (digest,)).fetchone()[0])

    def victims(self, limit: int, now_seconds: float) -> list[Record]:
        candidates: list[tuple[float, float, str, str]] = []
        with self._reading() as connection:
            for (number,) in connection.execute(CLASSES).fetchall():
                heads = connection.execute(
                    "SELECT accessed_seconds, namespace, key FROM entries"
                    " WHERE pinned = 0 AND gain_class = ? ORDER BY accessed_seconds LIMIT ?",
                    (number, limit),
                ).fetchall()
                if not all(isinstance(value, int | float) for value in (number, *(head[0] for head in heads))):
                    raise IndexCorrupt("the index holds numbers that cannot be")
                candidates += [(worth(least_gain(number), head[0], now_seconds), *head) for head in heads]
            rows = [
                connection.execute(
                    f"SELECT {COLUMNS} FROM entries WHERE namespace = ? AND key = ?",  # noqa: S608 - constant columns
                    name,
                ).fetchone()
                for _, _, *name in heapq.nsmallest(limit, candidates)
            ]
        return [record_of(row) for row in rows if row is not None]

    def totals(self, namespace: Namespace | None = None) -> IndexTotals:
        if namespace is None:
            return self._totals
        with self._reading() as connection:
            return totals_of(
                connection.execute("SELECT entries, charged_bytes FROM totals WHERE namespace = ?", (namespace,))
            )

    def reset(self) -> None:
        with self._lock:
            self._drop_readers()
            # A damaged file may make even the close fail; the handle is gone all the same.
            with contextlib.suppress(sqlite3.Error):
                self._writer.close()
            self._complete = False
            self._set_aside()
            self._open()

    def _set_aside(self) -> None:
        # One damaged file is kept for a person; its write-ahead log belongs to it.
        with translated("the damaged index could not be set aside"):
            for suffix in ("", "-wal", "-shm"):
                path = self._path.with_name(self._path.name + suffix)
                with contextlib.suppress(FileNotFoundError):
                    path.replace(self._path.with_name(f"{self._path.name}.damaged{suffix}"))

    def _drop_readers(self) -> None:
        with self._readers_lock:
            self._era += 1
            readers, self._readers = self._readers, []
        for connection in readers:
            connection.close()

    def check(self) -> None:
        with self._writing() as connection:
            written = only_value(
                connection.execute("UPDATE facts SET value = value + 1 WHERE name = 'checks' RETURNING value")
            )
        with self._reading() as connection:
            read = only_value(connection.execute("SELECT value FROM facts WHERE name = 'checks'"))
        if read < written:
            raise StoreUnavailable("the index does not give back what was written", FailureKind.IO)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            token = secrets.token_hex(16) if self._complete else ""
            # Not being noted as complete only costs the next start a reconciliation.
            with contextlib.suppress(StoreError), self._writing() as connection:
                connection.execute("UPDATE facts SET value = ? WHERE name = 'complete'", (token,))
            self._closed = True
            self._drop_readers()
            self._writer.close()
            if token:
                with contextlib.suppress(OSError):
                    self._leave_note(token)
