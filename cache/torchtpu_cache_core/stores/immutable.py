"""An entry over bytes that nobody can change."""

from __future__ import annotations

from torchtpu_cache_core.entry import Entry


def immutable(entry: Entry) -> Entry:
    """`entry` itself where its buffer is `bytes` or its own; else a checked copy, so that the caller may reuse its own.

    Raises:
        CorruptEntry: the buffer changed since the entry was parsed.
    """
    if entry.owned or type(entry.buffer.obj) is bytes:
        return entry
    return Entry.parse(bytes(entry.buffer))
