"""The fault layer: operating-system calls of the disk store that fail at chosen moments."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtpu_cache_core.stores.files import Files


@dataclass(slots=True, kw_only=True)
class Fault:
    """A failure to come.

    Args:
        call: the name of a method of `Files`.
        error: an errno; 0 makes a read or write short instead.
        skip: how many calls succeed first.
        times: how many calls fail then; None for all.
        rate: the chance that a call fails which could.
        after: does the call first, then fails: what a network file system does when its answer is lost.
        within: only calls on a path that holds this; calls on descriptors match the path they were opened with.
    """

    call: str
    error: int
    skip: int = 0
    times: int | None = None
    rate: float = 1.0
    after: bool = False
    within: str = ""


class FaultyFiles(Files):
    """`Files` with a plan of faults. Thread-safe. `hits` counts the faults that struck, by call."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.faults = list(faults)
        self.hits: dict[str, int] = {}
        self.calls: list[str] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()  # guards all above
        self._paths: dict[int, str] = {}

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Adds faults for a while."""
        self.faults += faults
        try:
            yield
        finally:
            self.faults = [fault for fault in self.faults if fault not in faults]

    def _strike(self, call: str, where: str) -> Fault | None:
        with self._lock:
            self.calls.append(call)
            for fault in self.faults:
                if fault.call != call or fault.within not in where or self._random.random() >= fault.rate:
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    if fault.times <= 0:
                        continue
                    fault.times -= 1
                self.hits[call] = self.hits.get(call, 0) + 1
                return fault
        return None

    @contextlib.contextmanager
    def _call(self, call: str, where: Path | str | int) -> Iterator[None]:
        path = self._paths.get(where, "") if isinstance(where, int) else str(where)
        fault = self._strike(call, path)
        if fault is not None and not fault.after:
            raise OSError(fault.error, os.strerror(fault.error))
        yield
        if fault is not None:
            raise OSError(fault.error, os.strerror(fault.error))

    def open(self, path: Path | str, flags: int, mode: int = 0o600) -> int:
        fd = -1
        try:
            with self._call("open", path):
                fd = super().open(path, flags, mode)
        except OSError:
            if fd >= 0:
                super().close(fd)
            raise
        self._paths[fd] = str(path)
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def read(self, fd: int, size_bytes: int) -> bytes:
        fault = self._strike("read", self._paths.get(fd, ""))
        if fault is None:
            return super().read(fd, size_bytes)
        if fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        return super().read(fd, max(1, size_bytes // 2))

    def rewind(self, fd: int) -> None:
        with self._call("rewind", fd):
            super().rewind(fd)

    def write(self, fd: int, data: memoryview) -> int:
        fault = self._strike("write", self._paths.get(fd, ""))
        if fault is None:
            return super().write(fd, data)
        written = super().write(fd, data[: max(1, len(data) // 2)])  # a disk fills up in the middle
        if fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        return written

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._call("pwrite", fd):
            return super().pwrite(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        with self._call("truncate", fd):
            super().truncate(fd, size_bytes)

    def fsync(self, fd: int) -> None:
        with self._call("fsync", fd):
            super().fsync(fd)

    def fstat(self, fd: int) -> os.stat_result:
        with self._call("fstat", fd):
            return super().fstat(fd)

    def lstat(self, path: Path) -> os.stat_result:
        with self._call("lstat", path):
            return super().lstat(path)

    def statvfs(self, path: Path) -> os.statvfs_result:
        with self._call("statvfs", path):
            return super().statvfs(path)

    def listdir(self, path: Path) -> list[str]:
        with self._call("listdir", path):
            return super().listdir(path)

    def mkdir(self, path: Path) -> None:
        with self._call("mkdir", path):
            super().mkdir(path)

    def link(self, source: Path, target: Path) -> None:
        with self._call("link", target):
            super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        with self._call("rename", target):
            super().rename(source, target)

    def unlink(self, path: Path) -> None:
        with self._call("unlink", path):
            super().unlink(path)

    def utime(self, fd: int, seconds: float) -> None:
        with self._call("utime", fd):
            super().utime(fd, seconds)

    def flock(self, fd: int, operation: int) -> None:
        with self._call("flock", fd):
            super().flock(fd, operation)
