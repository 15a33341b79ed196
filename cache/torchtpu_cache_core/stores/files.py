"""The operating-system calls of the disk store, behind one object so that a test can make any of them fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path


class Files:
    """Each method is the system call of its name, and what its docstring adds to that; all raise `OSError` likewise.
    No program that is started inherits a descriptor; a forked child does."""

    def open(self, path: Path | str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Fails only for a descriptor that is not open. A late write error (network file systems) is no news: what
        matters was fsynced before, and the rest has a digest."""
        try:
            os.close(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise

    def read(self, fd: int, size_bytes: int) -> bytes:
        return os.read(fd, size_bytes)

    def rewind(self, fd: int) -> None:
        """Goes to the file's beginning."""
        os.lseek(fd, 0, os.SEEK_SET)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def lstat(self, path: Path) -> os.stat_result:
        return os.lstat(path)

    def statvfs(self, path: Path) -> os.statvfs_result:
        return os.statvfs(path)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)  # noqa: PTH208 - the call itself, for the fault layer

    def mkdir(self, path: Path) -> None:
        """With mode 0700."""
        path.mkdir(mode=0o700)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target, follow_symlinks=False)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)  # noqa: PTH104 - the call itself, for the fault layer

    def unlink(self, path: Path) -> None:
        os.unlink(path)  # noqa: PTH108 - the call itself, for the fault layer

    def utime(self, fd: int, seconds: float) -> None:
        """Sets both times of an open file."""
        os.utime(fd, (seconds, seconds))

    def flock(self, fd: int, operation: int) -> None:
        fcntl.flock(fd, operation)

    def let_go(self, fd: int) -> None:
        """Unlocks a file and closes it. A child that was forked meanwhile holds it open, and closing alone would leave
        the lock with it for as long as it lives."""
        try:
            with contextlib.suppress(OSError):  # no locks here
                self.flock(fd, fcntl.LOCK_UN)
        finally:
            self.close(fd)

    def sync_folder(self, folder: Path) -> None:
        """Brings a folder's names to the disk, with the calls above."""
        fd = self.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.fsync(fd)
        except OSError as error:
            # Some file systems have no fsync for folders; their names are safe by other means or not at all.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        finally:
            self.close(fd)


FILES = Files()
