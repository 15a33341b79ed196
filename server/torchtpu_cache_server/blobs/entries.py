"""A blob, read as the entry that it should be."""

from __future__ import annotations

from typing import Final

from torchtpu_cache_core.entry import PREFIX, Frame, Verifier
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, EntryTooLarge
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.names import Digest
from torchtpu_cache_server.blobs.bucket import OpenObject

_CHUNK_BYTES: Final = 1 << 20


def header_of_blob(blob: OpenObject) -> Header:
    """The header of a blob of the right length; CorruptEntry if it has none."""
    frame = _read_frame(blob)
    return Header.from_bytes(blob.read_at(PREFIX.size, frame.header_bytes))


def _read_frame(blob: OpenObject) -> Frame:
    try:
        frame = Frame.parse(blob.read_at(0, PREFIX.size))
    except EntryTooLarge as error:
        raise CorruptEntry(CorruptReason.LENGTH, str(error)) from None
    if blob.size_bytes < frame.entry_bytes:
        raise CorruptEntry(CorruptReason.SHORT, "ends before its trailer")
    if blob.size_bytes > frame.entry_bytes:
        raise CorruptEntry(CorruptReason.LENGTH, "longer than it declares")
    return frame


def check_blob(blob: OpenObject) -> tuple[Header, Digest]:
    """Checks all of a blob; CorruptEntry if it is no entry, StoreError if it cannot be read."""
    _read_frame(blob)
    verifier = Verifier()
    offset = 0
    while piece := blob.read_at(offset, _CHUNK_BYTES):
        verifier.feed(piece)
        offset += len(piece)
    return verifier.finish()
