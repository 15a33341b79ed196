"""Where what is no entry is set aside: kept for people for a while, out of every reader's way."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import CorruptReason
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.reading import occupied_bytes

MAX_FILES: Final = 64
MAX_BYTES: Final = 256 << 20
_NAME: Final = re.compile(r"([0-9]{1,15})\.([a-z]{1,16})\.([0-9a-f]{8})\.([a-z0-9]{1,16}-[0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """Something that was set aside.

    Args:
        path: where it is now.
        key: what it stood under.
        reason: why.
        set_aside_seconds: when, since the Unix epoch.
    """

    path: Path
    key: Key
    reason: str
    size_bytes: int
    set_aside_seconds: float


class Quarantine:
    """A folder bounded in files and bytes; the oldest go first. Only regular files are ever removed. Thread-safe."""

    def __init__(self, folder: Path, files: Files, clock: Clock) -> None:
        self._folder = folder
        self._files = files
        self._clock = clock

    def take(self, path: Path, key: Key, reason: CorruptReason) -> None:
        """Moves `path` here; OSError if that cannot be done. The folder must exist."""
        name = f"{int(self._clock.time() * 1000)}.{reason}.{secrets.token_hex(4)}.{key}"
        self._files.rename(path, self._folder / name)
        self.trim()

    def contents(self) -> list[Quarantined]:
        """What is here, oldest first; OSError if the folder cannot be listed."""
        return [item for item, _ in self._items()]

    def trim(self) -> None:
        """Keeps the bounds. What cannot be listed or removed now is left for the next time."""
        with contextlib.suppress(OSError):
            items = [(item, occupied) for item, occupied in self._items() if occupied is not None]
            total = sum(occupied for _, occupied in items)
            while items and (len(items) > MAX_FILES or total > MAX_BYTES):
                (oldest, occupied), *items = items
                total -= occupied
                self._files.unlink(oldest.path)

    def _items(self) -> list[tuple[Quarantined, int | None]]:
        """Each item, and what it occupies if it may be removed."""
        found: list[tuple[Quarantined, int | None]] = []
        try:
            names = self._files.listdir(self._folder)
        except FileNotFoundError:
            return found
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            try:
                status = self._files.lstat(self._folder / name)
            except FileNotFoundError:
                continue
            item = Quarantined(
                path=self._folder / name,
                key=Key(match[4]),
                reason=match[2],
                size_bytes=status.st_size,
                set_aside_seconds=int(match[1]) / 1000,
            )
            found.append((item, self._occupied(status)))
        return sorted(found, key=lambda pair: (pair[0].set_aside_seconds, pair[0].path.name))

    @staticmethod
    def _occupied(status: os.stat_result) -> int | None:
        return occupied_bytes(status) if stat.S_ISREG(status.st_mode) else None
