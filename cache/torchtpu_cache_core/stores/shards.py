"""One shard's folder at a time: what is in it, what was left behind, and what may be evicted."""

from __future__ import annotations

import enum
import fcntl
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.eviction import Candidate
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.stores.failures import has_no_locks
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.layout import Layout, is_temp, key_named, shard_named
from torchtpu_cache_core.stores.ledger import ShardScan
from torchtpu_cache_core.stores.reading import occupied_bytes, opened, read_header

LEFTOVER_SECONDS: Final = 60.0
"""A temporary file this old is looked at; it goes only if no living writer holds its lock. The age covers the moment
between a file's creation and its lock."""

LOCKLESS_LEFTOVER_SECONDS: Final = 86_400.0
"""Where the file system has no locks, only age can tell, and no write takes a day."""


class _Leftover(enum.Enum):
    LIVE = enum.auto()
    COLLECTED = enum.auto()
    STAYS = enum.auto()


@dataclass(frozen=True, slots=True)
class Inventory:
    """The contents of one shard's folder.

    Args:
        keys: of regular files named like entries, with what each counts for.
        leftover_bytes: what leftovers count for that could not be removed.
        collected: how many leftovers were removed just now.
        live: temporary files that may belong to a living writer.
        foreign: names of everything else.
    """

    keys: dict[Key, int]
    leftover_bytes: int
    collected: int
    live: int
    foreign: list[str]

    def scan(self, shard: int, change: int) -> ShardScan:
        size = sum(self.keys.values()) + self.leftover_bytes
        return ShardScan(shard, change, len(self.keys), size, self.live > 0)


class Shards:
    """Looks into the folders of a layout. Thread-safe; takes no locks but those of dead writers."""

    def __init__(self, layout: Layout, files: Files, clock: Clock) -> None:
        self._layout = layout
        self._files = files
        self._clock = clock

    def present(self) -> list[int]:
        """The shards that have a folder."""
        try:
            names = self._files.listdir(self._layout.entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(shard for name in names if (shard := shard_named(name)) is not None)

    def inventory(self, shard: int) -> Inventory:
        """What is in a shard's folder; removes leftovers of writers that died. OSError if it cannot be listed."""
        folder = self._layout.shard_dir(shard)
        keys: dict[Key, int] = {}
        foreign: list[str] = []
        leftover_bytes = collected = live = 0
        for name in self._listed(folder):
            try:
                status = self._files.lstat(folder / name)
            except OSError:  # it went away, or cannot be looked at: nothing that we could count
                continue
            key = key_named(name, shard)
            if not stat.S_ISREG(status.st_mode) or (key is None and not is_temp(name)):
                foreign.append(name)
            elif key is not None:
                keys[key] = occupied_bytes(status)
            else:
                match self._collect(folder / name, abs(self._clock.time() - status.st_mtime)):
                    case _Leftover.LIVE:
                        live += 1
                    case _Leftover.COLLECTED:
                        collected += 1
                    case _Leftover.STAYS:
                        leftover_bytes += occupied_bytes(status)
        return Inventory(keys, leftover_bytes, collected, live, foreign)

    def keys(self) -> Iterator[Key]:
        """All keys that have a regular file. OSError only if the store's folder itself cannot be listed."""
        for shard in self.present():
            folder = self._layout.shard_dir(shard)
            try:
                names = self._listed(folder)
            except OSError:
                continue  # one folder that cannot be listed hides no other
            yield from (key for name in names if (key := key_named(name, shard)) is not None)

    def sample(self, wanted: int) -> tuple[list[Candidate[Key]], list[tuple[Key, CorruptEntry]]]:
        """Entries to choose victims from, out of random shards, and what was met that is no entry.

        Gives about `wanted`, or all there are. Unreadable ones come as the least worth: nobody can use them.
        """
        candidates: list[Candidate[Key]] = []
        corrupt: list[tuple[Key, CorruptEntry]] = []
        shards = self.present()
        random.shuffle(shards)
        for shard in shards:
            room = wanted - len(candidates) - len(corrupt)
            if room <= 0:
                break
            try:
                names = self._listed(self._layout.shard_dir(shard))
            except OSError:
                continue
            keys = [key for name in names if (key := key_named(name, shard)) is not None]
            for key in random.sample(keys, min(room, len(keys))):
                try:
                    candidate = self._candidate(key)
                except CorruptEntry as error:
                    corrupt.append((key, error))
                else:
                    if candidate is not None:
                        candidates.append(candidate)
        return candidates, corrupt

    def _candidate(self, key: Key) -> Candidate[Key] | None:
        """None for what is gone, or no regular file: not ours to remove."""
        path = self._layout.entry(key)
        try:
            status = self._files.lstat(path)
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        try:
            with opened(self._files, path) as file:
                header, _ = read_header(self._files, file, key)
        except OSError:
            seconds, stored, accessed = 0.0, 0.0, 0.0
        else:
            # What another machine compiled has been used there before it came.
            seconds, stored, accessed = header.compile_seconds, header.created_seconds, status.st_mtime
        return Candidate(
            item=key,
            size_bytes=occupied_bytes(status),
            compile_seconds=seconds,
            stored_seconds=stored,
            accessed_seconds=accessed,
        )

    def _collect(self, path: Path, age_seconds: float) -> _Leftover:
        """Removes a temporary file unless its writer lives. While we hold its lock, nobody else takes it for dead."""
        if age_seconds <= LEFTOVER_SECONDS:
            return _Leftover.LIVE
        try:
            with opened(self._files, path) as file:
                try:
                    self._files.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if not has_no_locks(error) or age_seconds <= LOCKLESS_LEFTOVER_SECONDS:
                        return _Leftover.LIVE
                self._files.unlink(path)
        except (OSError, CorruptEntry):
            return _Leftover.STAYS
        return _Leftover.COLLECTED

    def _listed(self, folder: Path) -> list[str]:
        """The names in a shard's folder; none where there is no such folder."""
        try:
            return self._files.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
