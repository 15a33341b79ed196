"""A bucket in a folder of one machine.

An object is published by: temporary file in the same folder, fsync, hard link to its name (which fails where the name
is taken), fsync of the folder. Blobs are spread over 256 folders by the first two digits of their digest. Temporary
names begin with a dot, which no object's name can.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from torchtpu_cache_core.errors import FailureKind, StoreError, StoreRefused, StoreUnavailable
from torchtpu_cache_core.identity import signature_of
from torchtpu_cache_core.stores.failures import store_error, translated
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.reading import occupied_bytes
from torchtpu_cache_server.blobs.bucket import (
    Bucket,
    BucketCapabilities,
    ObjectInfo,
    OpenObject,
    Space,
    Staged,
)
from torchtpu_cache_server.blobs.layout import BLOBS, PROBES, ObjectName
from torchtpu_cache_server.blobs.reserve import Reserve

_TEMPORARY: Final = ".writing-"
_PROBE: Final = re.compile(r"[0-9a-f]{16}-[0-9]+")
_QUARANTINE: Final = "quarantine"
_RESERVE: Final = "reserve"
_MAX_QUARANTINED: Final = 32
_MAX_QUARANTINED_BYTES: Final = 256 << 20
_NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})


class BucketFiles(Files):
    """`Files`, and what a bucket calls beside it."""

    def scandir(self, path: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        return os.scandir(path)

    def pread(self, fd: int, size_bytes: int, offset: int) -> bytes:
        return os.pread(fd, size_bytes, offset)


BUCKET_FILES: Final = BucketFiles()


class _OpenFile(OpenObject):
    def __init__(self, files: BucketFiles, descriptor: int, status: os.stat_result) -> None:
        self._files = files
        self.descriptor: int | None = descriptor
        self.size_bytes = status.st_size
        self.identity = signature_of(status)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        if self.descriptor is None:
            raise ValueError("read of a closed object")
        pieces = []
        with translated("an object could not be read"):
            while size_bytes > 0 and (piece := self._files.pread(self.descriptor, size_bytes, offset)):
                pieces.append(piece)
                offset += len(piece)
                size_bytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def is_unchanged(self) -> bool:
        if self.descriptor is None:
            raise ValueError("a closed object")
        # A file that loses its name, by a delete or to another file, gets a new ctime as one that is written does.
        try:
            return signature_of(os.fstat(self.descriptor)) == self.identity
        except OSError as error:
            raise store_error(error, "an object could not be looked at") from error

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            self._files.close(descriptor)


class _StagedFile(Staged):
    def __init__(self, files: Files, name: ObjectName, path: Path) -> None:
        self.name = name
        self.path = path
        self._files = files
        self.descriptor = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        with translated("an object could not be written"):
            while view:
                view = view[self._files.write(self.descriptor, view) :]

    def discard(self) -> None:
        if self.descriptor < 0:
            return
        self._files.close(self.descriptor)
        self.descriptor = -1
        # What cannot be removed now is a leftover, which is collected by age.
        with contextlib.suppress(OSError):
            self._files.unlink(self.path)


class FileBucket(Bucket):
    """Objects as files below a folder that belongs to this process alone (the service holds a lock on it).

    Args:
        root: the folder; made, with mode 0700, where it is absent.

    Raises:
        StoreError: the folder cannot be made.
    """

    def __init__(self, root: Path, *, files: BucketFiles = BUCKET_FILES) -> None:
        self._root = root
        self._prefix = f"{root}/"
        self._files = files
        # Tells our own temporary files from those of a process that died.
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._folders_lock = threading.Lock()
        self._reserve = Reserve(root / _RESERVE, files)
        with translated("the data folder could not be made"):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def capabilities(self) -> BucketCapabilities:
        return BucketCapabilities(name="files", exclusive=True)

    def path(self, name: ObjectName) -> Path:
        """Where an object lies."""
        return Path(self._place(name))

    def _place(self, name: ObjectName) -> str:
        # Not as a Path, which costs more to build than a file to open.
        if name.startswith(BLOBS):
            digest = name[len(BLOBS) :]
            return f"{self._prefix}{BLOBS}{digest[:2]}/{digest}"
        return self._prefix + name

    def stage(self, name: ObjectName) -> Staged:
        path = self.path(name)
        with translated("an object could not be written"):
            self._make_folder(path.parent)
            return _StagedFile(self._files, name, path.with_name(f"{_TEMPORARY}{self._token}-{next(self._numbers)}"))

    def create(self, staged: Staged) -> bool:
        assert isinstance(staged, _StagedFile)
        path = self.path(staged.name)
        with translated("an object could not be written"):
            self._files.fsync(staged.descriptor)
            try:
                self._files.link(staged.path, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in _NO_LINKS:
                    raise StoreRefused("the data folder must be on a file system with hard links") from error
                raise
            self._files.sync_folder(path.parent)
        return True

    def open(self, name: ObjectName) -> OpenObject | None:
        try:
            descriptor = self._files.open(self._place(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
                return None  # a symlink, a socket or a file where a folder should be: none of ours
            raise store_error(error, "an object could not be opened") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            self._files.close(descriptor)
            return None
        return _OpenFile(self._files, descriptor, status)

    def url(self, name: ObjectName, lifetime_seconds: float) -> str | None:
        return None

    def head(self, name: ObjectName) -> ObjectInfo | None:
        try:
            status = self._files.lstat(self.path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise store_error(error, "an object could not be looked at") from error
        return ObjectInfo(name, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def refresh(self, name: ObjectName) -> bool:
        found = self.open(name)
        if found is None or found.descriptor is None:
            return False
        with found, translated("an object could not be refreshed"):
            self._files.utime(found.descriptor, time.time())
        return True

    def delete(self, name: ObjectName) -> bool:
        if self.head(name) is None:
            return False
        try:
            self._files.unlink(self.path(name))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error(error, "an object could not be deleted") from error
        return True

    def set_aside(self, name: ObjectName) -> bool:
        folder = self._root / _QUARANTINE
        with translated("a bad object could not be set aside"):
            try:
                self._files.lstat(self.path(name))  # whatever it is, the name must be free again
            except (FileNotFoundError, NotADirectoryError):
                return False
            self._make_folder(folder)
            self._files.rename(self.path(name), folder / f"{name.replace('/', '_')}-{secrets.token_hex(4)}")
            self._trim_quarantine(folder)
        return True

    def _trim_quarantine(self, folder: Path) -> None:
        """Keeps the newest, up to a number of files and bytes, which no limit of the service counts."""
        statuses = [
            (Path(item.path), item.stat(follow_symlinks=False))
            for item in os.scandir(folder)
            if item.is_file(follow_symlinks=False)
        ]
        left_bytes = _MAX_QUARANTINED_BYTES
        for number, (path, status) in enumerate(sorted(statuses, key=lambda pair: -pair[1].st_ctime_ns)):
            left_bytes -= occupied_bytes(status)
            if number >= _MAX_QUARANTINED or left_bytes < 0:
                self._files.unlink(path)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix.startswith(BLOBS):
            for folder in self._scan(self._root / BLOBS):
                for item in self._scan(Path(folder.path)):
                    if item.name[:2] == folder.name and (info := _info(BLOBS + item.name, item)):
                        yield info
            return
        yield from self._list(self._root / prefix, prefix)

    def _list(self, folder: Path, prefix: str) -> Iterator[ObjectInfo]:
        for item in self._scan(folder):
            if item.is_dir(follow_symlinks=False):
                yield from self._list(Path(item.path), f"{prefix}{item.name}/")
            elif info := _info(prefix + item.name, item):
                yield info

    def space(self) -> Space | None:
        with translated("the free space could not be read"):
            status = self._files.statvfs(self._root)
        return Space(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)

    def collect_leftovers(self, before_seconds: float) -> int:
        removed = 0
        probes = str(self._root / PROBES.rstrip("/"))
        for folder, _, files in os.walk(self._root):
            for file in files:
                is_ours = file.startswith(_TEMPORARY) or (folder == probes and _PROBE.fullmatch(file))
                if not is_ours or self._token in file:
                    continue
                path = Path(folder, file)
                # One that vanishes or cannot be removed is tried again in the next round.
                with contextlib.suppress(OSError):
                    if path.lstat().st_mtime < before_seconds:
                        path.unlink()
                        removed += 1
        return removed

    def make_way(self) -> None:
        self._reserve.give_up_where_full()

    def keep_room(self) -> None:
        self._reserve.fill()

    def probe(self) -> None:
        content = secrets.token_bytes(16)
        name = ObjectName(f"{PROBES}{self._token}-{next(self._numbers)}")
        try:
            if not self.create_bytes(name, content):
                raise StoreRefused("the bucket refused a new object as if it were there", FailureKind.PROTOCOL)
            if self.create_bytes(name, b""):
                raise StoreRefused("the bucket overwrites objects", FailureKind.PROTOCOL)
            if self.read(name, len(content) + 1) != content:
                raise StoreUnavailable("the bucket does not give back what was written", FailureKind.IO)
        finally:
            with contextlib.suppress(StoreError):
                self.delete(name)

    def close(self) -> None:
        pass

    def _make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        with self._folders_lock:
            missing = [folder]
            while not missing[-1].parent.is_dir():
                missing.append(missing[-1].parent)
            for path in reversed(missing):
                with contextlib.suppress(FileExistsError):  # another process of ours, long ago or just now
                    self._files.mkdir(path)
                self._files.sync_folder(path.parent)

    def _scan(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        try:
            with self._files.scandir(folder) as items:
                yield from items
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing was written there yet
        except OSError as error:
            raise store_error(error, "the bucket could not be listed") from error


def _info(name: str, item: os.DirEntry[str]) -> ObjectInfo | None:
    try:
        if not item.is_file(follow_symlinks=False):
            return None
        status = item.stat(follow_symlinks=False)
        return ObjectInfo(ObjectName(name), status.st_size, status.st_mtime)
    except (FileNotFoundError, ValueError):
        return None  # it vanished, or its name is none of ours
