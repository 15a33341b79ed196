"""An entry: one stored executable with its header, the same bytes at every tier and on the wire.

| offset | bytes | what (integers little-endian) |
|---|---|---|
| 0 | 8 | magic `89 54 54 43 45 0d 0a 1a` |
| 8 | 2 | format version, now 1 |
| 10 | 2 | zero |
| 12 | 4 | header length H |
| 16 | 8 | payload length P |
| 24 | H | header: JSON, ASCII, sorted names, no spaces |
| 24 + H | P | payload: the executable, coded as the header's `codec` says |
| 24 + H + P | 32 | SHA-256 of all bytes before |

The entry's **digest** is the SHA-256 of the whole entry, trailer included. The magic has a byte over 0x7f, a CR LF
and a ^Z, so that a text-mode copy breaks it visibly. docs/entry.md says what each header field means.

Every byte is hostile until `Entry.parse` returns: nothing is unpickled, all lengths have hard caps, decompression is
bounded by what the header declares, and the header's components must hash to the header's key.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import zstandard

from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, EntryTooLarge, InvalidRequest
from torchtpu_cache_core.header import CODEC_RAW, CODEC_ZSTD, MAX_EXECUTABLE_BYTES, Header
from torchtpu_cache_core.key import Component, key_of
from torchtpu_cache_core.names import Digest, Key

MAGIC: Final = b"\x89TTCE\r\n\x1a"
FORMAT_VERSION: Final = 1
READABLE_VERSIONS: Final = frozenset({1})
"""N and N-2 stay readable (docs/entry.md)."""

PREFIX: Final = struct.Struct("<8sHHIQ")
TRAILER_BYTES: Final = 32

MAX_HEADER_BYTES: Final = 1 << 20
MAX_ENTRY_BYTES: Final = 2 << 30
MAX_EXPANSION: Final = 1024
"""How many times its payload an executable may be. Writers store raw beyond it, so a small bomb stays small."""

# facts of the format, not settings: a reader can be asked for 16 MiB of window and no more
_WINDOW_LOG: Final = 24
_COMPRESSION: Final = zstandard.ZstdCompressionParameters.from_level(
    1,
    window_log=_WINDOW_LOG,
    enable_ldm=True,
    write_checksum=True,
    write_content_size=True,
    write_dict_id=False,
)


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the parts of an entry are, from its fixed prefix."""

    header_bytes: int
    payload_bytes: int

    @property
    def payload_offset(self) -> int:
        return PREFIX.size + self.header_bytes

    @property
    def trailer_offset(self) -> int:
        return self.payload_offset + self.payload_bytes

    @property
    def entry_bytes(self) -> int:
        return self.trailer_offset + TRAILER_BYTES

    @classmethod
    def parse(cls, prefix: bytes | memoryview, max_entry_bytes: int = MAX_ENTRY_BYTES) -> Self:
        """Reads the first 24 bytes of an entry.

        Raises:
            CorruptEntry: too short, another magic or version, or lengths over the hard caps.
            EntryTooLarge: well formed, but over `max_entry_bytes`.
        """
        if len(prefix) < PREFIX.size:
            raise CorruptEntry(CorruptReason.SHORT, "shorter than its fixed prefix")
        magic, version, zero, header_bytes, payload_bytes = PREFIX.unpack_from(prefix)
        if magic != MAGIC:
            raise CorruptEntry(CorruptReason.MAGIC, "not an entry")
        if version not in READABLE_VERSIONS or zero:
            raise CorruptEntry(CorruptReason.VERSION, f"format version {version} is not readable here")
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_ENTRY_BYTES:
            raise CorruptEntry(CorruptReason.LENGTH, "a length is over the hard cap")
        frame = cls(header_bytes, payload_bytes)
        if frame.entry_bytes > max_entry_bytes:
            raise EntryTooLarge(frame.entry_bytes, max_entry_bytes)
        return frame


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A whole, checked entry over a buffer that nobody changes.

    Args:
        owned: nobody else holds the buffer, so that it stays as it is though its memory could be written to.
    """

    header: Header
    digest: Digest
    buffer: memoryview
    frame: Frame
    owned: bool = field(default=False, repr=False)
    _unpacked: list[bytes | memoryview] = field(default_factory=list, repr=False)

    @property
    def key(self) -> Key:
        return self.header.key

    @property
    def size_bytes(self) -> int:
        """Of the entry as stored."""
        return len(self.buffer)

    @classmethod
    def build(
        cls,
        executable: bytes | memoryview,
        *,
        components: Sequence[Component],
        executable_format: str,
        producer: str,
        road: str,
        compile_seconds: float,
        created_seconds: float,
        key: Key | None = None,
        compress: bool = True,
    ) -> Self:
        """Packs an executable. Costs about 2 ms per MB, most of it compression.

        Args:
            key: of the components, where the caller has it already; no reader accepts another.
            compress: False stores the bytes as they are, for those that come compressed.

        Raises:
            EntryTooLarge: over the format's hard caps.
            InvalidRequest: the components make no key.
        """
        if len(executable) > MAX_EXECUTABLE_BYTES:
            raise EntryTooLarge(len(executable), MAX_EXECUTABLE_BYTES)
        executable = bytes(executable)  # the caller may reuse a buffer that can change; bytes are not copied
        payload, codec = executable, CODEC_RAW
        if compress:
            packed = zstandard.ZstdCompressor(compression_params=_COMPRESSION).compress(executable)
            if len(packed) < len(executable) <= MAX_EXPANSION * len(packed):
                payload, codec = packed, CODEC_ZSTD
        header = Header(
            key=key_of(components) if key is None else key,
            components=tuple(components),
            executable_format=executable_format,
            codec=codec,
            executable_bytes=len(executable),
            producer=producer,
            road=road,
            compile_seconds=float(compile_seconds),
            created_seconds=float(created_seconds),
        )
        raw_header = header.to_bytes()
        if len(raw_header) > MAX_HEADER_BYTES:
            raise InvalidRequest("the components are too large for an entry's header")
        frame = Frame(len(raw_header), len(payload))
        if frame.entry_bytes > MAX_ENTRY_BYTES:
            raise EntryTooLarge(frame.entry_bytes, MAX_ENTRY_BYTES)
        prefix = PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(raw_header), len(payload))
        body = b"".join((prefix, raw_header, payload))
        whole = body + hashlib.sha256(body).digest()
        entry = cls(header, Digest(hashlib.sha256(whole).hexdigest()), memoryview(whole), frame)
        entry._unpacked.append(executable)
        return entry

    @classmethod
    def parse(cls, buffer: bytes | memoryview, max_entry_bytes: int = MAX_ENTRY_BYTES) -> Self:
        """Checks a whole entry: magic, version, lengths, digest, header, components against key.

        The payload is not unpacked here; `executable` does that, bounded by the header.

        Raises:
            CorruptEntry: anything wrong.
            EntryTooLarge: well formed, but over `max_entry_bytes`.
        """
        verifier = Verifier(max_entry_bytes)
        view = memoryview(buffer)
        verifier.feed(view)
        header, digest = verifier.finish()
        return cls(header, digest, view.toreadonly(), verifier.frame)

    def executable(self) -> bytes | memoryview:
        """The executable, unpacked at the first call and kept.

        Raises:
            CorruptEntry: the payload is not what the header says; at most the declared size was allocated.
        """
        if not self._unpacked:
            self._unpacked.append(self._unpack())
        return self._unpacked[0]

    def _unpack(self) -> bytes | memoryview:
        payload = self.buffer[self.frame.payload_offset : self.frame.trailer_offset]
        declared = self.header.executable_bytes
        if self.header.codec == CODEC_RAW:
            if len(payload) != declared:
                raise CorruptEntry(CorruptReason.PAYLOAD, "a raw payload of another length than declared")
            return payload
        if declared > MAX_EXPANSION * len(payload):
            raise CorruptEntry(CorruptReason.LENGTH, "declares more than a payload of its size may hold")
        try:
            parameters = zstandard.get_frame_parameters(payload)
            if parameters.content_size != declared or parameters.window_size > 1 << _WINDOW_LOG:
                raise CorruptEntry(CorruptReason.PAYLOAD, "the zstd frame and the header disagree")
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG)
            # Into a buffer of the declared size at once: a frame that holds more than it says fails there.
            unpacked = decompressor.decompress(payload, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise CorruptEntry(CorruptReason.PAYLOAD, str(error)[:200]) from None
        if len(unpacked) != declared:
            raise CorruptEntry(CorruptReason.PAYLOAD, "unpacks to another length than declared")
        return unpacked

    def check(self, key: Key, components: Sequence[Component] | None = None) -> None:
        """Refuses an entry that answers another question than the one asked.

        Raises:
            CorruptEntry: another key; or, where `components` are given, any that differs. For a foreign scheme the
                key is not made of all components, so equal keys alone would not prove equal targets.
        """
        if self.header.key != key:
            raise CorruptEntry(CorruptReason.KEY, "holds another key than the one asked for")
        if components is not None and self.header.components != tuple(components):
            raise CorruptEntry(CorruptReason.TARGET, "was made for another request than the one asked for")


class Verifier:
    """Checks an entry that arrives in pieces, in constant memory beside its header. Not thread-safe.

    `feed` raises as soon as the bytes cannot become an entry; `finish` returns header and digest, or raises.
    """

    def __init__(self, max_entry_bytes: int = MAX_ENTRY_BYTES) -> None:
        self._max_entry_bytes = max_entry_bytes
        self._head = bytearray()
        self._trailer = bytearray()
        self._body = hashlib.sha256()
        self._seen = 0
        self._frame: Frame | None = None
        self._header: Header | None = None

    @property
    def frame(self) -> Frame:
        """Known once 24 bytes were fed."""
        if self._frame is None:
            raise CorruptEntry(CorruptReason.SHORT, "shorter than its fixed prefix")
        return self._frame

    @property
    def header(self) -> Header | None:
        """Known, and checked on its own, once prefix and header were fed."""
        return self._header

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Takes the next piece.

        Raises:
            CorruptEntry: the bytes so far cannot become an entry.
            EntryTooLarge: the entry declares more than the limit.
        """
        view = memoryview(data)
        if self._header is None:
            view = self._feed_head(view)
        if not view or self._frame is None:
            return
        room = self._frame.trailer_offset - self._seen
        if room > 0:
            piece = view[:room]
            self._body.update(piece)
            self._seen += len(piece)
            view = view[room:]
        if view:
            self._trailer += view[: TRAILER_BYTES + 1]
            self._seen += len(view)
            if self._seen > self._frame.entry_bytes:
                raise CorruptEntry(CorruptReason.LENGTH, "longer than it declares")

    def _feed_head(self, view: memoryview) -> memoryview:
        for wanted in (PREFIX.size, None):
            if wanted is None:
                if self._frame is None:
                    self._frame = Frame.parse(bytes(self._head), self._max_entry_bytes)
                wanted = self._frame.payload_offset
            piece = view[: max(0, wanted - len(self._head))]
            self._head += piece
            view = view[len(piece) :]
            if len(self._head) < wanted:
                return view
        assert self._frame is not None
        self._header = Header.from_bytes(bytes(self._head[PREFIX.size :]))
        self._body.update(self._head)
        self._seen = len(self._head)
        return view

    def finish(self) -> tuple[Header, Digest]:
        """Header and digest of the whole entry.

        Raises:
            CorruptEntry: it is cut short, or its trailer is not the digest of what came before.
        """
        frame = self.frame
        if self._header is None or self._seen < frame.entry_bytes:
            raise CorruptEntry(CorruptReason.SHORT, "ends before its trailer")
        if self._body.digest() != bytes(self._trailer):
            raise CorruptEntry(CorruptReason.DIGEST, "its trailer is not the digest of what stands before it")
        whole = self._body.copy()
        whole.update(self._trailer)
        return self._header, Digest(whole.hexdigest())
