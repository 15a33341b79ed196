"""This machine's own key: what marks entries that were compiled here, and are trusted here only."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchtpu_cache_core.errors import FailureKind, StoreError, StoreRefused
from torchtpu_cache_core.paths import ensure_private_dir
from torchtpu_cache_core.stores.failures import translated

if TYPE_CHECKING:
    from torchtpu_cache_core.manifest import Attestation

MACHINE_KEY_BYTES: Final = 32
_NAME: Final = "machine.key"
_TEMP_PREFIX: Final = f".{_NAME}-"
_ATTEMPTS: Final = 4


def machine_key(root: Path) -> bytes:
    """The 32 bytes in `<root>/machine.key`, made at the first call; all processes get the same ones.

    A file of another length (a full disk, a loss of power) is replaced: what was marked with it loses its mark.

    Raises:
        StoreRefused: others may read the file, or it is not ours.
        StoreError: it cannot be read or made.
    """
    path = root / _NAME
    with translated("the machine's key could not be read or made"):
        for _ in range(_ATTEMPTS):
            key = _read(path)
            if key is not None and len(key) == MACHINE_KEY_BYTES:
                return key
            ensure_private_dir(root)
            # Another process was quicker, and its key counts; or it took our temporary file for a dead writer's.
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                _write(path, secrets.token_bytes(MACHINE_KEY_BYTES), replaces=key is not None)
    raise StoreRefused(f"{path} changes while it is read; remove it")


def is_still(root: Path, key: bytes) -> bool:
    """Whether `key`, from an earlier `machine_key`, is this machine's key still; one that is gone is put back.

    A process outlives a cache folder that somebody removes. What it marks afterwards must be known to the next one.

    Raises:
        StoreError: as `machine_key`.
    """
    path = root / _NAME
    with translated("the machine's key could not be read or put back"):
        found = _read(path)
        if found is None:
            ensure_private_dir(root)
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # as in `machine_key`
                _write(path, key, replaces=False)
            found = _read(path)
    return found == key


def known_here(attestation: Attestation, root: Path, key: bytes) -> Attestation | None:
    """Without its mark where `key` is not this machine's any more: a new process would take the entry for a bad one."""
    if attestation.machine_mac is None:
        return attestation
    with contextlib.suppress(StoreError):
        if is_still(root, key):
            return attestation
    return None if attestation.manifest is None else replace(attestation, machine_mac=None)


def _read(path: Path) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StoreRefused(
                f"{path} must be a file that only you can read; remove it, and a new one is made", FailureKind.FORBIDDEN
            )
        if status.st_nlink > 1:
            _collect(path.parent)  # its writer died before it could take the other name away
        return os.read(fd, MACHINE_KEY_BYTES + 1)
    finally:
        os.close(fd)


def _write(path: Path, key: bytes, *, replaces: bool) -> None:
    temp = path.with_name(f"{_TEMP_PREFIX}{secrets.token_hex(8)}")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, key)
        os.fsync(fd)
        if replaces:
            temp.replace(path)
        else:
            path.hardlink_to(temp)
        _collect(path.parent)
    finally:
        os.close(fd)
        temp.unlink(missing_ok=True)


def _collect(root: Path) -> None:
    """Removes what dead writers left. A living one that loses its temporary file so tries again."""
    for temp in root.glob(f"{_TEMP_PREFIX}*"):
        with contextlib.suppress(OSError):
            temp.unlink()
