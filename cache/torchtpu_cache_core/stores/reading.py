"""Reads entry files: whole and checked, or only their headers. Opens nothing but regular files, follows no links.

Files are read, never mapped: another tool may cut a mapped file short, and the page that is gone then kills the
process (SIGBUS). Entries are stored compressed, a few MB at most, and reading one costs less than its digest.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchtpu_cache_core.entry import MAX_ENTRY_BYTES, PREFIX, Entry, Frame, Verifier
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, EntryTooLarge
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.manifest import BLOCK_PREFIX, MAX_BLOCK_JSON_BYTES, Attestation
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.store import Stored
from torchtpu_cache_core.stores.files import Files

_MAX_BLOCK_BYTES: Final = BLOCK_PREFIX.size + MAX_BLOCK_JSON_BYTES + 32
_MAX_FILE_BYTES: Final = MAX_ENTRY_BYTES + _MAX_BLOCK_BYTES
_PEEK_BYTES: Final = 16 << 10
_PIECE_BYTES: Final = 1 << 20
_CHECKED_FIRST_BYTES: Final = 32 << 20
"""A larger file is checked before room is taken for it: a file that grew to gigabytes costs no memory. Entries are
seldom so large, for they are stored compressed."""

BLOCK_BYTES: Final = 4096
_NOT_A_FILE: Final = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})  # a symbolic link, a socket, a device


def occupied_bytes(status: os.stat_result) -> int:
    """What a file counts for: its blocks, and at least its size rounded up to one, for some file systems allocate
    late or not at all."""
    return max(status.st_blocks * 512, rounded_bytes(status.st_size))


def rounded_bytes(size_bytes: int) -> int:
    """What a file of this size will count for, before it is written."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open regular file and its status."""

    fd: int
    status: os.stat_result


@contextmanager
def opened(files: Files, path: Path) -> Iterator[OpenFile]:
    """Opens a file of the store.

    Raises:
        CorruptEntry: it is no regular file.
        OSError: as `open` does; FileNotFoundError where there is nothing.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        fd = files.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise CorruptEntry(CorruptReason.MAGIC, "no regular file") from None
        raise
    try:
        status = files.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptEntry(CorruptReason.MAGIC, "no regular file")
        yield OpenFile(fd, status)
    finally:
        files.close(fd)


def read_entry(
    files: Files, file: OpenFile, namespace: Namespace, key: Key, machine_key: bytes | None = None
) -> Stored:
    """The whole entry of `key`, checked, with the attestation behind it.

    Args:
        machine_key: what a machine's mark is held against; None takes a mark as it is.

    Raises:
        CorruptEntry: anything else is in the file.
        OSError: it could not be read.
    """
    entry, block = _entry_and_rest(files, file, key)
    attestation = Attestation.from_block(block) if block else None
    if attestation is not None:
        if attestation.manifest is not None:
            attestation.manifest.check(namespace, key, entry.digest)
        if machine_key is not None:
            attestation.check_mark(machine_key, namespace, entry)
    return Stored(entry, attestation)


def read_bare_entry(files: Files, file: OpenFile, key: Key) -> Entry:
    """The entry of `key` that fills the file, checked. CorruptEntry, OSError as `read_entry`."""
    entry, rest = _entry_and_rest(files, file, key)
    if rest:
        raise CorruptEntry(CorruptReason.LENGTH, "longer than it declares")
    return entry


def _entry_and_rest(files: Files, file: OpenFile, key: Key) -> tuple[Entry, memoryview]:
    size = file.status.st_size
    if size > _MAX_FILE_BYTES:
        raise CorruptEntry(CorruptReason.LENGTH, "longer than any entry")
    if size > _CHECKED_FIRST_BYTES:
        _check_in_pieces(files, file, key)
    view = memoryview(_read(files, file.fd, size))
    end = _frame(view).entry_bytes
    entry = Entry.parse(view[:end])
    entry.check(key)
    return entry, view[end:]


def _check_in_pieces(files: Files, file: OpenFile, key: Key) -> None:
    """Refuses what is no entry of `key` in constant memory, and goes back to the file's beginning."""
    head = _read(files, file.fd, PREFIX.size)
    end = _frame(head).entry_bytes
    if file.status.st_size > end + _MAX_BLOCK_BYTES:
        raise CorruptEntry(CorruptReason.MANIFEST, "what stands behind the entry is longer than any block")
    verifier = Verifier()
    verifier.feed(head)
    left = end - len(head)
    while left > 0 and (piece := files.read(file.fd, min(left, _PIECE_BYTES))):
        verifier.feed(piece)
        left -= len(piece)
        if verifier.header is not None and verifier.header.key != key:
            raise CorruptEntry(CorruptReason.KEY, "holds another key than its name says")
    verifier.finish()
    files.rewind(file.fd)


def _frame(head: bytes | memoryview) -> Frame:
    try:
        return Frame.parse(head)
    except EntryTooLarge as error:
        raise CorruptEntry(CorruptReason.LENGTH, str(error)) from None


def read_header(files: Files, file: OpenFile, key: Key) -> tuple[Header, Frame]:
    """The header and lengths of the entry of `key`, checked on their own; the payload is not looked at.

    Raises:
        CorruptEntry, OSError: as `read_entry`.
    """
    head = _read(files, file.fd, min(_PEEK_BYTES, file.status.st_size))
    frame = _frame(head)
    if file.status.st_size < frame.entry_bytes:
        raise CorruptEntry(CorruptReason.SHORT, "shorter than it declares")
    if len(head) < frame.payload_offset:
        head += _read(files, file.fd, frame.payload_offset - len(head))
    header = Header.from_bytes(head[PREFIX.size : frame.payload_offset])
    if header.key != key:
        raise CorruptEntry(CorruptReason.KEY, "holds another key than its name says")
    return header, frame


def _read(files: Files, fd: int, size_bytes: int) -> bytes:
    """Up to `size_bytes` from where the file stands; fewer only at its end."""
    data = files.read(fd, size_bytes)
    if len(data) == size_bytes:
        return data
    parts, got = [data], len(data)
    while data and got < size_bytes:
        data = files.read(fd, size_bytes - got)
        parts.append(data)
        got += len(data)
    return b"".join(parts)
