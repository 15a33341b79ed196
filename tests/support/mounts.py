"""Small file systems of a drill's own, to be filled, emptied of inodes, made read-only, or broken."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_OTHERS: Final = "filled by others"
_PIECE: Final = bytes(1 << 16)


class MountRefused(Exception):
    """This process may not mount; the message says why."""


class Mount:
    """A mounted file system; `folder` is one on it for the drill, beside what others fill it with."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.folder = root / "ours"
        self.folder.mkdir(mode=0o700)

    def fill(self) -> None:
        """Others take the last byte."""
        with open(self._root / _OTHERS, "ab", buffering=0) as file:
            with contextlib.suppress(OSError):
                while True:
                    file.write(_PIECE)
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x")

    def take_inodes(self) -> None:
        """Others take the last inode."""
        folder = self._root / f"{_OTHERS} to the last inode"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            for number in range(1 << 20):
                (folder / str(number)).touch()

    def give_back(self) -> None:
        """Others give back all that they took."""
        (self._root / _OTHERS).unlink(missing_ok=True)
        folder = self._root / f"{_OTHERS} to the last inode"
        for path in folder.glob("*"):
            path.unlink()

    def set_read_only(self, read_only: bool) -> None:
        """As an operator does, or a kernel that met an error."""
        _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(self._root))


@contextmanager
def tmpfs(root: Path, *, size_bytes: int, inodes: int = 100_000) -> Iterator[Mount]:
    """A file system in memory.

    Raises:
        MountRefused: this process may not mount.
    """
    root.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},nr_inodes={inodes},mode=0700", "tmpfs", str(root))
    try:
        yield Mount(root)
    finally:
        _unmount(root)


class BrokenDisk(Mount):
    """ext4 on a loop device whose image loses its end: what lies there cannot be read any more (EIO)."""

    def __init__(self, root: Path, image: Path) -> None:
        super().__init__(root)
        self._image = image
        self._size_bytes = image.stat().st_size

    @contextmanager
    def broken(self, from_bytes: int) -> Iterator[None]:
        """Whatever lies behind `from_bytes` of the disk is unreadable for the time of the block."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                self._drop_from_memory(path)
        with self._image.open("rb+") as image:
            image.seek(from_bytes)
            end = image.read()
            image.truncate(from_bytes)
            try:
                yield
            finally:
                image.seek(from_bytes)
                image.write(end)

    @staticmethod
    def _drop_from_memory(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextmanager
def broken_disk(root: Path, *, size_bytes: int) -> Iterator[BrokenDisk]:
    """A file system on a loop device.

    Raises:
        MountRefused: this process may not mount, or there is no loop device or no mkfs.ext4.
    """
    root.mkdir()
    image = root.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard", str(image))
    _run("mount", "-o", "loop,errors=continue,noatime", str(image), str(root))
    try:
        yield BrokenDisk(root, image)
    finally:
        _unmount(root)
        image.unlink(missing_ok=True)


def _run(*command: str) -> None:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        raise MountRefused(f"{command[0]}: {os.strerror(error.errno or errno.ENOENT)}") from error
    if answer.returncode:
        raise MountRefused(f"{' '.join(command[:3])}: {answer.stderr.strip()}")


def _unmount(root: Path) -> None:
    # Lazily where something still holds it: a drill's end leaves nothing mounted.
    if subprocess.run(["umount", str(root)], capture_output=True, check=False, timeout=60).returncode:
        subprocess.run(["umount", "-l", str(root)], capture_output=True, check=False, timeout=60)
