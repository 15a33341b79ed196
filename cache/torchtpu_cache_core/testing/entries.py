"""Builders of entries for tests: valid ones, rivals, and bytes that must never reach a loader."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import zstandard

from torchtpu_cache_core.entry import FORMAT_VERSION, MAGIC, MAX_ENTRY_BYTES, MAX_HEADER_BYTES, PREFIX, Entry, Frame
from torchtpu_cache_core.errors import CorruptReason
from torchtpu_cache_core.header import MAX_EXECUTABLE_BYTES
from torchtpu_cache_core.jsontext import canonical_json
from torchtpu_cache_core.key import MAX_TEXT_BYTES, Component, key_of
from torchtpu_cache_core.names import Key

CREATED_SECONDS: Final = 1_764_500_000.0
_BOMB_BYTES: Final = 16 << 20


def components_for(name: str, **replaced: str) -> list[Component]:
    """The components of an invented request: a short, real-looking list; `replaced` uses _ for . in names."""
    values = {
        "scheme": "ttc1",
        "executable_format": "pjrt",
        "program.form": "portable-1.13.0",
        "program": f"module @{name}" + " " * MAX_TEXT_BYTES,  # over the text limit, so that it shows as a digest
        "options.num_replicas": "1",
        "target.platform": "cpu",
        "target.platform_version": "test 1",
        "target.compiler": hashlib.sha256(b"the compiler").hexdigest(),
        "environment.XLA_FLAGS": "",
    }
    for parameter, value in replaced.items():
        values[parameter.replace("_", ".", 1)] = value
    return [Component.of(n, v) for n, v in values.items()]


def key_for(name: str) -> Key:
    """The key that `entry_for` gives to the same name."""
    return key_of(components_for(name))


def executable_for(name: str, size_bytes: int = 2000) -> bytes:
    """Bytes that belong to `name` and do not compress, so that sizes come out as asked for."""
    return random.Random(name).randbytes(size_bytes)


def entry_for(
    name: str,
    *,
    size_bytes: int = 2000,
    compile_seconds: float = 1.0,
    executable: bytes | None = None,
    created_seconds: float = CREATED_SECONDS,
) -> Entry:
    """A valid entry; the same arguments give the same bytes.

    Args:
        size_bytes: of the invented executable, where none is given.
    """
    return Entry.build(
        executable_for(name, size_bytes) if executable is None else executable,
        components=components_for(name),
        executable_format="pjrt",
        producer="testing 1",
        road="topology",
        compile_seconds=compile_seconds,
        created_seconds=created_seconds,
    )


def rival_of(entry: Entry) -> Entry:
    """Another valid entry under the same key: what a second compiler run may give."""
    return Entry.build(
        bytes(entry.executable()) + b"another",
        components=entry.header.components,
        executable_format=entry.header.executable_format,
        producer=entry.header.producer,
        road=entry.header.road,
        compile_seconds=entry.header.compile_seconds,
        created_seconds=entry.header.created_seconds,
    )


def header_fields(entry: Entry) -> dict[str, Any]:
    """The header as its JSON object, to be bent."""
    fields: dict[str, Any] = json.loads(entry.header.to_bytes())
    return fields


def payload_of(entry: Entry) -> bytes:
    return bytes(entry.buffer[entry.frame.payload_offset : entry.frame.trailer_offset])


def sealed(
    header: bytes | dict[str, Any],
    payload: bytes,
    *,
    magic: bytes = MAGIC,
    version: int = FORMAT_VERSION,
    zero: int = 0,
    header_bytes: int | None = None,
    payload_bytes: int | None = None,
) -> bytes:
    """An entry with a right trailer over whatever it is given: what somebody who can write here would plant."""
    raw = header if isinstance(header, bytes) else canonical_json(header)
    prefix = PREFIX.pack(
        magic,
        version,
        zero,
        len(raw) if header_bytes is None else header_bytes,
        len(payload) if payload_bytes is None else payload_bytes,
    )
    body = prefix + raw + payload
    return body + hashlib.sha256(body).digest()


@dataclass(frozen=True, slots=True)
class Corruption:
    """Bytes that stand under a key and are not its entry.

    Args:
        name: for a test's id.
        data: the bytes.
        reason: what a reader must say; of PAYLOAD and unpacking LENGTH only once the executable is asked for.
        at_unpack: the entry is well formed, and its payload is the lie.
    """

    name: str
    data: bytes
    reason: CorruptReason
    at_unpack: bool = False


def corruptions(entry: Entry) -> Iterator[Corruption]:
    """Every way to be wrong that a reader of `entry.key` must see, each `CorruptReason` of an entry at least once."""
    yield from _damaged(entry)
    yield from _bent_headers(entry)
    yield from _lying_payloads(entry)


def _damaged(entry: Entry) -> Iterator[Corruption]:
    good = bytes(entry.buffer)
    header, payload = entry.header.to_bytes(), payload_of(entry)

    def flipped(at: int) -> bytes:
        return good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]

    yield Corruption("empty", b"", CorruptReason.SHORT)
    yield Corruption("prefix only", good[: PREFIX.size], CorruptReason.SHORT)
    yield Corruption("cut in the header", good[: PREFIX.size + 10], CorruptReason.SHORT)
    yield Corruption("cut in the payload", good[: entry.frame.trailer_offset - 1], CorruptReason.SHORT)
    yield Corruption("cut in the trailer", good[:-1], CorruptReason.SHORT)
    yield Corruption("another file", b"\x7fELF" + bytes(len(good)), CorruptReason.MAGIC)
    yield Corruption("pickle bomb", pickle.dumps(PickleBomb()) + bytes(64), CorruptReason.MAGIC)
    yield Corruption("text-mode copy", good.replace(b"\r\n", b"\n"), CorruptReason.MAGIC)
    yield Corruption("version to come", sealed(header, payload, version=FORMAT_VERSION + 9), CorruptReason.VERSION)
    yield Corruption("reserved bits", sealed(header, payload, zero=1), CorruptReason.VERSION)
    too_long = MAX_HEADER_BYTES + 1
    yield Corruption("header over its cap", sealed(header, payload, header_bytes=too_long), CorruptReason.LENGTH)
    yield Corruption("payload of 2^63", sealed(header, payload, payload_bytes=1 << 63), CorruptReason.LENGTH)
    yield Corruption("payload of 2^64 - 1", sealed(header, payload, payload_bytes=(1 << 64) - 1), CorruptReason.LENGTH)
    yield Corruption("flipped payload bit", flipped(entry.frame.payload_offset + 1), CorruptReason.DIGEST)
    yield Corruption("flipped trailer bit", flipped(len(good) - 1), CorruptReason.DIGEST)
    yield Corruption("flipped header bit", flipped(PREFIX.size + 2), CorruptReason.HEADER)


def _bent_headers(entry: Entry) -> Iterator[Corruption]:
    fields, payload = header_fields(entry), payload_of(entry)

    def bent(name: str, reason: CorruptReason = CorruptReason.HEADER, **changed: Any) -> Corruption:
        return Corruption(name, sealed({**fields, **changed}, payload), reason)

    def raw(name: str, header: bytes) -> Corruption:
        return Corruption(name, sealed(header, payload), CorruptReason.HEADER)

    text = canonical_json(fields)
    components = fields["components"]
    other = entry_for("another key altogether")
    yield raw("header is no JSON", b"not json at all")
    yield raw("header is a list", b"[]")
    yield raw("header is empty", b"")
    yield raw("header nests deeply", b'{"key":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    yield raw("name stands twice", text[:-1] + b',"key":"' + entry.key.encode() + b'"}')
    yield raw("NaN", text.replace(b'"compile_seconds":', b'"compile_seconds":NaN,"x":'))
    yield raw("number of absurd length", text.replace(b'"executable_bytes":', b'"executable_bytes":' + b"9" * 5000))
    yield raw("not UTF-8", text[:-2] + b'\xff"}')
    yield bent("unknown field", extra=1)
    yield bent("path-like key", key="../../../../tmp/" + entry.key)
    yield bent("key of another type", key=7)
    yield bent("bool for a number", executable_bytes=True)
    yield bent("negative size", CorruptReason.LENGTH, executable_bytes=-1)
    yield bent("size over the cap", CorruptReason.LENGTH, executable_bytes=MAX_EXECUTABLE_BYTES + 1)
    yield bent("negative compile seconds", compile_seconds=-1.0)
    yield bent("unprintable producer", producer="a\nb")
    yield bent("endless producer", producer="a" * 10_000)
    yield bent("surrogate in a component", components=[{"name": "\ud800", "text": "a"}, *components])
    yield bent("component of two forms", components=[{**components[0], "sha256": "0" * 64, "size_bytes": 1}])
    yield bent("component twice", components=[*components, components[0]])
    yield bent("no components", components=[])
    yield bent("too many components", components=[{"name": str(i), "text": ""} for i in range(2000)])
    yield bent("unknown codec", CorruptReason.CODEC, codec="lz4")
    yield bent("swapped components", CorruptReason.KEY, components=[components[1], components[0], *components[2:]])
    yield bent("components of another key", CorruptReason.KEY, components=header_fields(other)["components"])
    yield Corruption("whole entry of another key", bytes(other.buffer), CorruptReason.KEY)


def _lying_payloads(entry: Entry) -> Iterator[Corruption]:
    fields = header_fields(entry)

    def lying(name: str, reason: CorruptReason, payload: bytes, **changed: Any) -> Corruption:
        return Corruption(name, sealed({**fields, **changed}, payload), reason, at_unpack=True)

    packed = zstandard.ZstdCompressor().compress(bytes(2000))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(_BOMB_BYTES))
    honest = {"codec": "zstd", "executable_bytes": 2000}
    yield lying("raw of another length", CorruptReason.PAYLOAD, b"abc", codec="raw", executable_bytes=4)
    yield lying("zstd that is none", CorruptReason.PAYLOAD, b"abc" * 100, **honest)
    yield lying("zstd cut short", CorruptReason.PAYLOAD, packed[:-1], **honest)
    yield lying("zstd with more behind", CorruptReason.PAYLOAD, packed + b"more", **honest)
    yield lying("two zstd frames", CorruptReason.PAYLOAD, packed + packed, **honest)
    yield lying("zstd that unpacks to more", CorruptReason.PAYLOAD, packed, codec="zstd", executable_bytes=1999)
    yield lying("bomb that hides its size", CorruptReason.PAYLOAD, bomb, codec="zstd", executable_bytes=len(bomb))
    yield lying("bomb that tells its size", CorruptReason.LENGTH, bomb, codec="zstd", executable_bytes=_BOMB_BYTES)
    yield lying("zstd of unknown size", CorruptReason.PAYLOAD, _unsized(bytes(2000)), **honest)
    yield lying("window over the cap", CorruptReason.PAYLOAD, _wide_window(), **honest)


def too_large_prefix() -> bytes:
    """A well-formed beginning of an entry at the format's hard cap."""
    frame = Frame(2, MAX_ENTRY_BYTES - PREFIX.size - 34)
    return PREFIX.pack(MAGIC, FORMAT_VERSION, 0, frame.header_bytes, frame.payload_bytes)


class PickleBomb:
    """Runs code when somebody unpickles it: the name of a variable in the environment tells that it went off."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return os.putenv, ("TORCHTPU_CACHE_PICKLE_BOMB", "went off")


def _unsized(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def _wide_window() -> bytes:
    """A frame by hand (RFC 8878), for a compressor never asks for more window than its content: 2,000 bytes in one
    raw block, with the content's size told and a window of 2^27."""
    content = bytes(2000)
    descriptor, window = 0b0100_0000, (27 - 10) << 3
    block = (len(content) << 3 | 1).to_bytes(3, "little")
    return (
        b"\x28\xb5\x2f\xfd" + bytes([descriptor, window]) + (len(content) - 256).to_bytes(2, "little") + block + content
    )
