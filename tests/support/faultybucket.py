"""The bucket's operating-system calls with the plan of faults that the disk store's have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torchtpu_cache_core.testing.faults import FaultyFiles
from torchtpu_cache_server.blobs.files import BucketFiles


class FaultyBucketFiles(FaultyFiles, BucketFiles):
    """A fault on `read` strikes positioned reads as well."""

    def scandir(self, path: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        with self._call("scandir", path):
            return super().scandir(path)

    def pread(self, fd: int, size_bytes: int, offset: int) -> bytes:
        fault = self._strike("read", self._paths.get(fd, ""))
        if fault is None:
            return super().pread(fd, size_bytes, offset)
        if fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        return super().pread(fd, max(1, size_bytes // 2), offset)
