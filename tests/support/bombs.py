"""zstd frames that no honest writer makes, put together by hand from RFC 8878: bombs, lies, and odd frames.

A frame of ten gigabytes of zeros is 320 KB here, and is never unpacked to be made.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import zstandard

from torchtpu_cache_core.entry import MAX_EXPANSION
from torchtpu_cache_core.header import MAX_EXECUTABLE_BYTES

HUGE_BYTES: Final = 10 << 30
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = 0x184D2A50
_BLOCK_BYTES: Final = 128 << 10
_RAW, _RLE, _RESERVED = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Bomb:
    """A payload that must be refused, and what the header says of it.

    Args:
        name: of its kind.
        payload: the frame, or what stands in its place.
        declared: `executable_bytes` of the header.
        codec: likewise.
    """

    name: str
    payload: bytes = field(repr=False)
    declared: int
    codec: str = "zstd"

    def header(self) -> dict[str, Any]:
        """The fields of the header that it needs."""
        return {"codec": self.codec, "executable_bytes": self.declared}


def frame(
    *blocks: tuple[int, int, int],
    content_bytes: int | None = None,
    window_log: int = 17,
    dictionary: int | None = None,
    unused: int = 0,
) -> bytes:
    """A frame of zeros.

    Args:
        blocks: kind, size and number of equal ones.
        content_bytes: what the frame says that it holds; None where it does not say.
        window_log: of the window that it asks for, 10 to 41.
        dictionary: the number of the one that it asks for.
        unused: bits of the descriptor that must be zero.
    """
    descriptor = unused | (0xC0 if content_bytes is not None else 0) | (1 if dictionary is not None else 0)
    head = _MAGIC + bytes([descriptor, (window_log - 10) << 3])
    head += b"" if dictionary is None else bytes([dictionary])
    head += b"" if content_bytes is None else struct.pack("<Q", content_bytes)
    body = b"".join(_block(kind, size) * count for kind, size, count in blocks[:-1])
    kind, size, count = blocks[-1]
    return head + body + _block(kind, size) * (count - 1) + _block(kind, size, last=True)


def _block(kind: int, size: int, *, last: bool = False) -> bytes:
    return (size << 3 | kind << 1 | last).to_bytes(3, "little") + bytes(size if kind == _RAW else 1)


def zeros(size_bytes: int, **options: Any) -> bytes:
    """A frame that unpacks to so many zeros, a multiple of 128 KiB."""
    return frame((_RLE, _BLOCK_BYTES, size_bytes // _BLOCK_BYTES), **options)


def _open_ended(single_block: bytes) -> bytes:
    """Says of its only block that another follows."""
    at = len(_MAGIC) + 2 + 8
    return single_block[:at] + bytes([single_block[at] & 0xFE]) + single_block[at + 1 :]


def skippable(size_bytes: int) -> bytes:
    """A frame that holds nothing for a reader."""
    return struct.pack("<II", _SKIPPABLE, size_bytes) + bytes(size_bytes)


def bombs(executable: bytes) -> Iterator[Bomb]:
    """Every kind, in place of the payload of `executable`, which has at least 1,000 bytes."""
    size = len(executable)
    packed = zstandard.ZstdCompressor().compress(executable)
    plain = frame((_RAW, 1000, 1), content_bytes=1000)
    yield Bomb("10 GB of zeros", zeros(HUGE_BYTES, content_bytes=HUGE_BYTES), size)
    yield Bomb("10 GB of untold size", zeros(HUGE_BYTES), size)
    yield Bomb("10 GB that say they are small", zeros(HUGE_BYTES, content_bytes=size), size)
    yield Bomb("10 GB declared as such", zeros(HUGE_BYTES, content_bytes=HUGE_BYTES), HUGE_BYTES)
    yield Bomb("4 GB declared as such", zeros(4 << 30, content_bytes=4 << 30), MAX_EXECUTABLE_BYTES)
    most = zeros(512 << 20)
    allowed = MAX_EXPANSION * (len(most) + 8)
    yield Bomb("as much as a payload may declare, and more", zeros(512 << 20, content_bytes=allowed), allowed)
    yield Bomb("window of 2^25", frame((_RAW, 1000, 1), content_bytes=1000, window_log=25), 1000)
    yield Bomb("window of 2^27", frame((_RAW, 1000, 1), content_bytes=1000, window_log=27), 1000)
    yield Bomb("window of 2^41", frame((_RAW, 1000, 1), content_bytes=1000, window_log=41), 1000)
    nested = zstandard.ZstdCompressor().compress(packed)
    yield Bomb("a frame within a frame", nested, size)
    yield Bomb("10 GB within a frame", zstandard.ZstdCompressor().compress(zeros(HUGE_BYTES)), size)
    yield Bomb("two frames", packed + packed, size)
    yield Bomb("two frames, the sum declared", packed + packed, 2 * size)
    yield Bomb("an empty frame first", frame((_RAW, 0, 1), content_bytes=0) + packed, size)
    yield Bomb("a skippable frame first", skippable(100) + packed, size)
    yield Bomb("a skippable frame behind", packed + skippable(100), size)
    yield Bomb("a skippable frame alone", skippable(size), size)
    yield Bomb("a skippable frame of 4 GB", struct.pack("<II", _SKIPPABLE, 0xFFFFFFFF) + bytes(size), size)
    yield Bomb("an unknown dictionary", frame((_RAW, 1000, 1), content_bytes=1000, dictionary=7), 1000)
    yield Bomb("a reserved bit", frame((_RAW, 1000, 1), content_bytes=1000, unused=8), 1000)
    yield Bomb("a reserved block", frame((_RESERVED, 1000, 1), content_bytes=1000), 1000)
    yield Bomb("200,000 empty blocks", frame((_RAW, 0, 200_000), (_RAW, 1, 1), content_bytes=1000), 1000)
    yield Bomb("a frame without its last block", _open_ended(plain), 1000)
    yield Bomb("no frame", bytes(size), size)
    yield Bomb("nothing", b"", size)
    yield Bomb("less than declared", packed, size + 1)
    yield Bomb("more than declared", packed, size - 1)
    yield Bomb("raw, less than declared", executable, size + 1, "raw")
    yield Bomb("raw, more than declared", executable, size - 1, "raw")
    yield Bomb("raw, 4 GB declared", executable, MAX_EXECUTABLE_BYTES, "raw")
