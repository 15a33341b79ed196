"""The identity of a file is the SHA-256 of its bytes, computed once and then remembered.

A compiler is half a gigabyte, so its digest is kept under what `stat` says of the file: device, inode, size, mtime
and ctime. ctime cannot be set back, so a file that was changed in place is hashed again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.notes import read_note, write_note

_MAX_MEMO_BYTES: Final = 1024
# Kernel timestamps are coarse: a file changed twice within one step looks the same, so a young file is not remembered.
_SETTLED_SECONDS: Final = 2.0

Signature = tuple[int, int, int, int, int]


def signature_of(status: os.stat_result) -> Signature:
    """What changes when a file is written or another one takes its place: more than the inode, which is used again."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


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
        self._known: dict[Signature, str] = {}
        self._lock = threading.RLock()  # held while hashing, so that one file is hashed once by many threads

    def sha256(self, path: Path | str) -> str:
        """SHA-256 of the file's bytes, 64 lower-case hex digits.

        Raises:
            Bypass: the file cannot be read, or changes while it is read; without it there is no safe key.
        """
        try:
            with self._lock, open(path, "rb") as file:
                before = signature_of(os.fstat(file.fileno()))
                known = self._known.get(before) or self._recall(before)
                if known is None:
                    known = hashlib.file_digest(file, "sha256").hexdigest()
                    if signature_of(os.fstat(file.fileno())) != before:
                        raise Bypass("target_unknown", f"{path} changed while it was read")
                    if not self._settled(before):
                        return known
                    self._remember(before, known)
                self._known[before] = known
                return known
        except OSError as error:
            raise Bypass("target_unknown", f"{path} cannot be read: {error.strerror}") from None

    def _settled(self, signature: Signature) -> bool:
        # Every change sets ctime. mtime is what somebody says, also of the future; so is a ctime from before the clock
        # was set back, and a change from now on gets another one.
        return abs(self._clock.time() - signature[4] / 1e9) > _SETTLED_SECONDS

    def _memo(self, signature: Signature) -> Path | None:
        # Named by device and inode, so that a newer state of a file replaces the older one's memo.
        return None if self._memo_dir is None else self._memo_dir / f"identity-{signature[0]:x}-{signature[1]:x}"

    def _recall(self, signature: Signature) -> str | None:
        memo = self._memo(signature)
        note = None if memo is None else read_note(memo, _MAX_MEMO_BYTES)
        if note is None:
            return None
        match note.value:
            case [list(stored), str(known)] if stored == list(signature) and len(known) == 64:
                return known
        return None

    def _remember(self, signature: Signature, known: str) -> None:
        memo = self._memo(signature)
        if memo is not None:
            write_note(memo, [signature, known], _MAX_MEMO_BYTES)
