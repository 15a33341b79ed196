"""Aliases: from a program's raw bytes to what its canonicalisation said, so that a warm look-up parses no MLIR.

One small file each, named by all that the answer depends on, with a digest of its own. An alias that is damaged,
foreign or cut short is absent, and the next `put` replaces it. Aliases are made by this machine for this user: they
are never fetched and never uploaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock

ALIAS_VERSION: Final = 1
_MAX_ALIAS_BYTES: Final = 256 << 10
_SHARDS: Final = 256
_PRUNE_EVERY: Final = 16
_REFRESH_SECONDS: Final = 86_400.0
_TEMP_PREFIX: Final = ".alias-"
_TEMP_SECONDS: Final = 3600.0


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
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(fd)
                # Whoever could write here could choose which program's executable answers.
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    return None
                record = _decode(file.read(_MAX_ALIAS_BYTES + 1), name)
                if record is not None and self._clock.time() - status.st_mtime > _REFRESH_SECONDS:
                    now = self._clock.time()
                    os.utime(fd, (now, now))
                return record
        except OSError:
            return None

    def put(self, name: str, record: Mapping[str, Any]) -> None:
        """Stores `record`, a JSON object, under `name`; dropped where the disk does not take it."""
        path = self._path(name)
        raw = _encode(name, record)
        if len(raw) > _MAX_ALIAS_BYTES:
            return
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, temp = tempfile.mkstemp(dir=path.parent, prefix=_TEMP_PREFIX)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(raw)
                # Not synced: after a crash a torn file fails its digest, and is made again.
                Path(temp).replace(path)
            except BaseException:
                with suppress(OSError):
                    Path(temp).unlink()
                raise
            if int(name[2:4], 16) % _PRUNE_EVERY == 0:
                self._prune(path.parent)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _prune(self, shard: Path) -> None:
        """Removes the oldest aliases over the limit of one shard, and what dead writers left in it."""
        aliases: list[tuple[float, str]] = []
        now = self._clock.time()
        for entry in os.scandir(shard):
            with suppress(OSError):
                age_seconds = now - entry.stat(follow_symlinks=False).st_mtime
                if entry.name.startswith(_TEMP_PREFIX):
                    if age_seconds > _TEMP_SECONDS:
                        Path(entry.path).unlink()
                elif len(entry.name) == 64:
                    aliases.append((age_seconds, entry.path))
        aliases.sort()
        for _, path in aliases[self._max_per_shard :]:
            with suppress(OSError):
                Path(path).unlink()


def _encode(name: str, record: Mapping[str, Any]) -> bytes:
    body = json.dumps({"alias": name, "record": record}, sort_keys=True).encode()
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode()


def _decode(raw: bytes, name: str) -> dict[str, Any] | None:
    body, _, digest = raw.rpartition(b"\n")
    if len(raw) > _MAX_ALIAS_BYTES or hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    try:
        stored = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(stored, dict) or stored.get("alias") != name:
        return None
    record = stored.get("record")
    return record if isinstance(record, dict) else None
