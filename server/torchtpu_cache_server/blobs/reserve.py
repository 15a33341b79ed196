"""Room kept back on a bucket's disk, so that an object can go when others have filled it.

A delete and an eviction write a tombstone and a record of the index before they free anything. On a disk without a
byte or an inode left they could never begin, so that a full disk would stay full for us.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

from torchtpu_cache_core.stores.files import Files

RESERVED_FILES: Final = 16
"""Each gives back an inode too: of the tombstone, its folder, and the index's log."""

RESERVED_FILE_BYTES: Final = 64 << 10
_LOW_BYTES: Final = 256 << 10
_LOW_INODES: Final = 8


class Reserve:
    """Files of zeros in `folder`, given up when the disk below runs full. Thread-safe."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self._lock = threading.Lock()  # guards the files and _is_whole
        self._is_whole = False

    def give_up_where_full(self) -> None:
        """Frees the reserve if the disk has no room left for a tombstone. Never raises."""
        with contextlib.suppress(OSError):
            if not self._is_full(1):
                return
            with self._lock:
                self._is_whole = False
                for path in self._paths():
                    with contextlib.suppress(FileNotFoundError):
                        self._files.unlink(path)

    def fill(self) -> bool:
        """Makes what is missing, unless that would fill the disk; whether all is there now. Never raises."""
        with self._lock:
            if not self._is_whole:
                try:
                    self._is_whole = not self._is_full(RESERVED_FILES) and self._filled()
                except OSError:
                    return False
            return self._is_whole

    def _paths(self) -> list[Path]:
        return [self._folder / str(number) for number in range(RESERVED_FILES)]

    def _is_full(self, times: int) -> bool:
        """Whether less is free than `times` the little that a tombstone takes."""
        space = self._files.statvfs(self._folder.parent)
        # Some file systems have no fixed number of inodes, and tell none.
        lacks_inodes = space.f_files > 0 and space.f_favail < times * _LOW_INODES
        return lacks_inodes or space.f_bavail * space.f_frsize < times * _LOW_BYTES

    def _filled(self) -> bool:
        with contextlib.suppress(FileExistsError):
            self._files.mkdir(self._folder)
        for path in self._paths():
            descriptor = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
            try:
                if self._files.fstat(descriptor).st_size < RESERVED_FILE_BYTES:
                    self._files.truncate(descriptor, 0)
                    view = memoryview(bytes(RESERVED_FILE_BYTES))
                    while view:
                        view = view[self._files.write(descriptor, view) :]
            finally:
                self._files.close(descriptor)
        return True
