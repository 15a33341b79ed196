"""Notes: small JSON files by which processes of one user spare each other work.

What a note says decides which executable answers. So it is believed only where this user alone can have written it,
and only whole: the file is JSON, a line feed, and the SHA-256 of that JSON in hex. Any other file is an absent note,
which the next write replaces. No failure of the disk reaches the caller: without notes a look-up is slower and no less
right.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core.regular import open_regular

_TEMP_PREFIX: Final = ".note-"
_TEMP_SECONDS: Final = 3600.0
"""A file being written that is older than this was left behind by a writer that died."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note that was read. `value` is whatever JSON holds: its form is the reader's to check."""

    value: Any
    modified_seconds: float


def read_note(path: Path, max_bytes: int) -> Note | None:
    """The note at `path`; None where there is none to believe, or it is over `max_bytes`."""
    try:
        with open_regular(path, follows_links=False) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            raw = file.read(max_bytes + 1)
    except OSError:
        return None
    body, _, digest = raw.rpartition(b"\n")
    if len(raw) > max_bytes or hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    try:
        return Note(json.loads(body), status.st_mtime)
    except (ValueError, RecursionError):
        return None


def write_note(path: Path, value: object, max_bytes: int) -> bool:
    """Puts a note at `path`, in a folder that is made with mode 0700 where it is absent; False where that failed.

    Removes what dead writers left in the folder.

    Args:
        value: what JSON can hold. One that would be over `max_bytes` is not written.
    """
    body = json.dumps(value, sort_keys=True).encode()
    raw = body + b"\n" + hashlib.sha256(body).hexdigest().encode()
    if len(raw) > max_bytes:
        return False
    try:
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
    except OSError:
        return False
    _collect(path.parent)
    return True


def _collect(folder: Path) -> None:
    with suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith(_TEMP_PREFIX):
                with suppress(OSError):  # another process collects too
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _TEMP_SECONDS:
                        Path(entry.path).unlink()
