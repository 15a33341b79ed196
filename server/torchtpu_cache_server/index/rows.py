"""What comes out of the SQLite file: rows and errors, neither of which is trusted."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any, Final

from torchtpu_cache_core.errors import CacheError, FailureKind, StoreFull, StoreUnavailable
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_server.index.base import IndexCorrupt, IndexTotals, Record

COLUMNS: Final = "manifest, executable_bytes, compile_seconds, created_seconds, accessed_seconds, target_name, pinned"
"""Of the table of entries, as `record_of` takes them."""

_DAMAGED: Final = frozenset(
    {
        *(sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
        # All statements and values are ours, so a table that is not there, or a rule that is broken, is not our doing.
        *(sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH),
    }
)


@contextlib.contextmanager
def translated_sqlite() -> Iterator[None]:
    """Translates what SQLite raises."""
    try:
        yield
    except UnicodeDecodeError as error:
        # SQLite quotes a damaged schema in its message, and the module cannot read that.
        raise IndexCorrupt("the index is damaged, and so is what SQLite says of it") from error
    except sqlite3.Error as error:
        # Misuse of the module, as after a failed reset, has no code. The low byte of an extended code is the plain one.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            raise IndexCorrupt(f"the index is damaged: {error}") from error
        if code == sqlite3.SQLITE_FULL:
            raise StoreFull("no room to write the index") from error
        raise StoreUnavailable(f"the index did not answer: {error}", FailureKind.IO) from error


def text_of(raw: bytes) -> str:
    """A text of the file; IndexCorrupt where it is none, which the module would tell without a code."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise IndexCorrupt("the index holds a text that is none") from None


def totals_of(rows: Iterable[tuple[Any, ...]]) -> IndexTotals:
    """Of rows with entries and bytes; IndexCorrupt where they hold anything else."""
    entries = charged_bytes = 0
    for row in rows:
        if not all(type(value) is int for value in row):
            raise IndexCorrupt("the index counts what cannot be counted")
        entries, charged_bytes = entries + row[0], charged_bytes + row[1]
    if entries < 0 or charged_bytes < 0:
        raise IndexCorrupt("the index has counted wrong")
    return IndexTotals(entries, charged_bytes)


def only_value(found: sqlite3.Cursor) -> Any:
    """The one value of a statement; IndexCorrupt where there is none."""
    row = found.fetchone()
    if row is None:
        raise IndexCorrupt("the index lacks what every index has")
    return row[0]


def record_of(row: tuple[Any, ...], namespace: str | None = None, key: str | None = None) -> Record:
    """The record of a row of `COLUMNS`; IndexCorrupt unless it is one, and of that name where one is given."""
    try:
        manifest = Manifest.from_bytes(row[0])
        if namespace is not None and (manifest.namespace, manifest.key) != (namespace, key):
            raise ValueError("it stands under another name")
        return Record(
            manifest=manifest,
            executable_bytes=int(row[1]),
            compile_seconds=float(row[2]),
            created_seconds=float(row[3]),
            accessed_seconds=float(row[4]),
            target_name=str(row[5]),
            pinned=bool(row[6]),
        )
    except (CacheError, TypeError, ValueError) as error:
        raise IndexCorrupt(f"the index holds a record that cannot be: {error}") from error
