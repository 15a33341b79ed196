"""The tables of the index in SQLite.

Entries of one `gain_class` (`core.eviction`) are evicted in the order of their last use. A use from
`used_again_seconds` on counts as another one, and puts an entry into its `class_used_again`. `pinned` leads the index,
so that who looks for victims reads nothing else.

`totals` counts the entries of each namespace, in the transaction that changes them: a start must not read them all.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = 3
SCHEMA: Final = """
    DROP TABLE IF EXISTS entries;
    DROP TABLE IF EXISTS totals;
    DROP TABLE IF EXISTS facts;
    CREATE TABLE entries (
        namespace TEXT NOT NULL,
        key TEXT NOT NULL,
        manifest BLOB NOT NULL,
        digest TEXT NOT NULL,
        size_bytes INTEGER NOT NULL,
        charged_bytes INTEGER NOT NULL,
        executable_bytes INTEGER NOT NULL,
        compile_seconds REAL NOT NULL,
        created_seconds REAL NOT NULL,
        accessed_seconds REAL NOT NULL,
        target_name TEXT NOT NULL,
        pinned INTEGER NOT NULL,
        used_again_seconds REAL NOT NULL,
        class_used_again INTEGER NOT NULL,
        gain_class INTEGER NOT NULL,
        PRIMARY KEY (namespace, key)
    ) WITHOUT ROWID;
    CREATE INDEX entries_by_class ON entries (pinned, gain_class, accessed_seconds);
    CREATE INDEX entries_by_digest ON entries (digest);
    CREATE TABLE totals (
        namespace TEXT PRIMARY KEY,
        entries INTEGER NOT NULL,
        charged_bytes INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
    INSERT INTO facts VALUES ('complete', 0), ('checks', 0);
"""
"""What a file of an older version holds is dropped: the bucket has it all."""

CLASSES: Final = """
    WITH RECURSIVE classes (gain_class) AS (
        SELECT min(gain_class) FROM entries WHERE pinned = 0
        UNION ALL
        SELECT (SELECT min(e.gain_class) FROM entries e WHERE e.pinned = 0 AND e.gain_class > c.gain_class)
        FROM classes c WHERE c.gain_class IS NOT NULL
    )
    SELECT gain_class FROM classes WHERE gain_class IS NOT NULL
"""
"""The classes that have entries: a step in the index for each, however many entries there are."""
