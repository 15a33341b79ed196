"""Aliases: from a program's raw bytes to what its canonicalisation said, so that a warm look-up parses no MLIR.

One note each (`notes`), named by all that the answer depends on. Aliases are made by this machine for this user: they
are never fetched and never uploaded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.notes import read_note, write_note

ALIAS_VERSION: Final = 1
_MAX_ALIAS_BYTES: Final = 256 << 10
_SHARDS: Final = 256
_PRUNE_EVERY: Final = 16
_REFRESH_SECONDS: Final = 86_400.0


def alias_name(*parts: str) -> str:
    """The name of the alias that depends on exactly these parts, in this order: 64 hex digits."""
    framed = hashlib.sha256(b"torchtpu-cache alias\0%d" % ALIAS_VERSION)
    for part in parts:
        raw = part.encode("utf-8", "surrogateescape")
        framed.update(len(raw).to_bytes(8, "little") + raw)
    return framed.hexdigest()


class AliasStore:
    """Records by alias name in a private folder. Thread-safe, and safe between processes.

    No failure of the disk reaches the caller: without aliases a look-up is slower and no less right.

    Args:
        folder: made where it is absent; nothing else should live in it.
        max_aliases: about how many are kept; beyond it the least recently used of a shard go.
        clock: for ages.
    """

    def __init__(self, folder: Path, *, max_aliases: int = 1 << 16, clock: Clock = SYSTEM_CLOCK) -> None:
        self._folder = folder
        self._max_per_shard = max(1, max_aliases // _SHARDS)
        self._clock = clock

    def get(self, name: str) -> dict[str, Any] | None:
        """The record under `name`, or None."""
        path = self._path(name)
        note = read_note(path, _MAX_ALIAS_BYTES)
        if note is None:
            return None
        match note.value:
            case {"alias": stored, "record": dict(record)} if stored == name:
                now = self._clock.time()
                if now - note.modified_seconds > _REFRESH_SECONDS:
                    with suppress(OSError):  # it looks older than it is, and may go earlier
                        os.utime(path, (now, now), follow_symlinks=False)
                return record
        return None

    def put(self, name: str, record: Mapping[str, Any]) -> None:
        """Stores `record`, a JSON object, under `name`; dropped where the disk does not take it."""
        path = self._path(name)
        written = write_note(path, {"alias": name, "record": dict(record)}, _MAX_ALIAS_BYTES)
        if written and int(name[2:4], 16) % _PRUNE_EVERY == 0:
            with suppress(OSError):  # the next prune finds what this one left
                self._prune(path.parent)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _prune(self, shard: Path) -> None:
        """Removes the oldest aliases over the limit of one shard."""
        aliases: list[tuple[float, str]] = []
        now = self._clock.time()
        for entry in os.scandir(shard):
            with suppress(OSError):
                if len(entry.name) == 64:
                    aliases.append((now - entry.stat(follow_symlinks=False).st_mtime, entry.path))
        aliases.sort()
        for _, path in aliases[self._max_per_shard :]:
            with suppress(OSError):
                Path(path).unlink()
