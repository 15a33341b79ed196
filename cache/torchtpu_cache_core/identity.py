"""The identity of a file is the SHA-256 of its bytes, computed once and then remembered.

A compiler is half a gigabyte, so its digest is kept under what `stat` says of the file: device, inode, size, mtime
and ctime. ctime cannot be set back, so a file that was changed in place is hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.errors import Bypass

_MAX_MEMO_BYTES: Final = 1024
# Kernel timestamps are coarse: a file changed twice within one step looks the same, so a young file is not remembered.
_SETTLED_SECONDS: Final = 2.0

_Stat = tuple[int, int, int, int, int]


class FileIdentities:
    """Digests of files, memoised in this process and, where a folder is given, on this machine. Thread-safe.

    Args:
        memo_dir: a private folder, made where it is absent; None keeps digests in this process only. A memo that
            cannot be read, written or trusted is no error: the file is hashed.
        clock: says how old a file is.
    """

    def __init__(self, memo_dir: Path | None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._memo_dir = memo_dir
        self._clock = clock
        self._known: dict[_Stat, str] = {}
        self._lock = threading.Lock()  # held while hashing, so that one file is hashed once by many threads

    def sha256(self, path: Path | str) -> str:
        """SHA-256 of the file's bytes, 64 lower-case hex digits.

        Raises:
            Bypass: the file cannot be read, or changes while it is read; without it there is no safe key.
        """
        try:
            with self._lock, open(path, "rb") as file:
                before = _identity(os.fstat(file.fileno()))
                known = self._known.get(before) or self._recall(before)
                if known is None:
                    known = hashlib.file_digest(file, "sha256").hexdigest()
                    if _identity(os.fstat(file.fileno())) != before:
                        raise Bypass("target_unknown", f"{path} changed while it was read")
                    if not self._settled(before):
                        return known
                    self._remember(before, known)
                self._known[before] = known
                return known
        except OSError as error:
            raise Bypass("target_unknown", f"{path} cannot be read: {error.strerror}") from None

    def _settled(self, identity: _Stat) -> bool:
        newest_seconds = max(identity[3], identity[4]) / 1e9
        return self._clock.time() - newest_seconds > _SETTLED_SECONDS

    def _memo(self, identity: _Stat) -> Path | None:
        # Named by device and inode, so that a newer state of a file replaces the older one's memo.
        return None if self._memo_dir is None else self._memo_dir / f"identity-{identity[0]:x}-{identity[1]:x}"

    def _recall(self, identity: _Stat) -> str | None:
        memo = self._memo(identity)
        if memo is None:
            return None
        try:
            fd = os.open(memo, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                status = os.fstat(fd)
                # A memo that another user could have written could name any digest.
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    return None
                raw = file.read(_MAX_MEMO_BYTES)
        except OSError:
            return None
        body, _, digest = raw.rpartition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        try:
            stored, known = json.loads(body)
        except (ValueError, TypeError):
            return None
        return known if stored == list(identity) and isinstance(known, str) and len(known) == 64 else None

    def _remember(self, identity: _Stat, known: str) -> None:
        memo = self._memo(identity)
        if memo is None:
            return
        body = json.dumps([identity, known]).encode()
        # A machine without a writable folder only hashes once more in its next process.
        with suppress(OSError):
            memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, temp = tempfile.mkstemp(dir=memo.parent, prefix=".identity-")
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(body + b"\n" + hashlib.sha256(body).hexdigest().encode())
                Path(temp).replace(memo)
            except BaseException:
                with suppress(OSError):
                    Path(temp).unlink()
                raise


def _identity(status: os.stat_result) -> _Stat:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
