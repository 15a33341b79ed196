"""Makes a file visible all at once, under a name that nobody has: temporary file, digest, fsync, link, folder fsync."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.layout import temp_name
from torchtpu_cache_core.stores.reading import occupied_bytes

_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK})
_WRITE_BYTES: Final = 8 << 20


def publish(files: Files, path: Path, entry: Entry, block: bytes, *, accessed_seconds: float, sync: bool) -> int | None:
    """Writes entry and block to `path`, in a folder that exists.

    Args:
        block: the attestation block, or nothing.
        sync: brings the file to the disk before it is seen. Without, a loss of power may leave a broken file there,
            which its digest tells.

    Returns:
        What the file counts for, or None if `path` was taken.

    Raises:
        CorruptEntry: the entry's buffer is not what its digest says.
        OSError: it failed; nothing is visible, and no temporary file is left unless removing it failed too.
    """
    temp = path.parent / temp_name()
    fd = files.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        # Held as long as this writer lives: who collects leftovers asks for it.
        with contextlib.suppress(OSError):  # no locks here: the leftover's age alone must do
            files.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with _removed(files, temp):
            digest = hashlib.sha256()
            for piece in _pieces(entry.buffer):
                _write(files, fd, piece)
                digest.update(piece)
            if digest.hexdigest() != entry.digest:
                raise CorruptEntry(CorruptReason.DIGEST, "the entry changed while it was written")
            _write(files, fd, memoryview(block))
            files.utime(fd, accessed_seconds)
            if sync:
                files.fsync(fd)
            status = files.fstat(fd)
            if not _linked(files, temp, path, status):
                return None
            if sync:
                _sync_folder_of(files, path)
            return occupied_bytes(status)
    finally:
        files.let_go(fd)


def make_folder(files: Files, folder: Path, below: Path) -> None:
    """Makes `folder` and what is missing between it and `below`, which exists; each is brought to the disk."""
    missing = [folder, *folder.parents]
    missing = missing[: missing.index(below)]
    for path in reversed(missing):
        try:
            files.mkdir(path)
        except FileExistsError:
            continue
        files.sync_folder(path.parent)


def _sync_folder_of(files: Files, path: Path) -> None:
    try:
        files.sync_folder(path.parent)
    except OSError:
        # Visible, but perhaps not for good: who asked is told of a failure, so nothing may be visible.
        with contextlib.suppress(OSError):
            files.unlink(path)
        raise


def _linked(files: Files, temp: Path, path: Path, status: os.stat_result) -> bool:
    """Gives the temporary file its name, unless the name is taken."""
    try:
        files.link(temp, path)
    except OSError as error:
        # A network file system may report a failure of what had succeeded: the inode tells.
        if _is_same(files, path, status):
            return True
        if isinstance(error, FileExistsError):
            return False
        if error.errno not in _NO_LINKS:
            raise
    else:
        return True
    return _renamed(files, temp, path)


def _renamed(files: Files, temp: Path, path: Path) -> bool:
    """The same without hard links, which some file systems lack: looks, then renames, under a lock on the folder."""
    fd = files.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.flock(fd, fcntl.LOCK_EX)  # for two calls that do no I/O of any length
        try:
            files.lstat(path)
        except FileNotFoundError:
            files.rename(temp, path)
            return True
        return False
    finally:
        files.let_go(fd)


def _is_same(files: Files, path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(files.lstat(path), status)
    except OSError:
        return False


@contextlib.contextmanager
def _removed(files: Files, temp: Path) -> Iterator[None]:
    """Removes the temporary name at the end, whatever the end is; what cannot be removed is collected by age."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            files.unlink(temp)


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), _WRITE_BYTES):
        yield buffer[start : start + _WRITE_BYTES]


def _write(files: Files, fd: int, data: memoryview) -> None:
    while data:
        data = data[files.write(fd, data) :]
