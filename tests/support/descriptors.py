"""What XLA itself says of its options: the protobuf descriptors inside a jaxlib library, read without importing it."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

from torchtpu_cache_core.canonical.wire import LENGTH, VARINT, Field, WireError, read_fields, read_varint

# Source: google/protobuf/descriptor.proto.
_KINDS: Final = {1: "double", 2: "float", 3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 14: "enum"}
_MESSAGE, _REPEATED = 11, 3
_SOURCES: Final = (b"xla/xla.proto", b"xla/pjrt/proto/compile_options.proto")

Message = dict[int, tuple[str, str]]
"""Name and kind (`bool`, `repeated string`, `map`, `message`, ...) by field number."""


def messages_of(library: Path) -> dict[str, Message]:
    """DebugOptions, CompileOptionsProto and ExecutableBuildOptionsProto."""
    found: dict[str, Message] = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for source in _SOURCES:
            for raw in _texts(read_fields(_file_descriptor(mapped, source)), 4):
                name = _last(read_fields(raw), 1)
                if name in (b"DebugOptions", b"CompileOptionsProto", b"ExecutableBuildOptionsProto"):
                    assert isinstance(name, bytes)
                    found[name.decode()] = _message(raw)
    assert len(found) == 3
    return found


def _last(fields: list[Field], number: int) -> bytes | int | None:
    return next((f.value for f in reversed(fields) if f.number == number), None)


def _texts(fields: list[Field], number: int) -> list[bytes]:
    return [f.value for f in fields if f.number == number and isinstance(f.value, bytes)]


def _file_descriptor(library: mmap.mmap, name: bytes) -> bytes:
    """The FileDescriptorProto of one source file: its fields run on until the bytes make no more sense."""
    start = library.find(b"\x0a" + bytes([len(name)]) + name + b"\x12")
    assert start >= 0, f"no descriptor of {name.decode()} in jaxlib"
    end = at = start
    try:
        while True:
            tag, behind = read_varint(library[at : at + 10], 0)
            if tag >> 3 not in range(1, 15) or tag & 7 not in (VARINT, LENGTH):
                break
            value, more = read_varint(library[at + behind : at + behind + 10], 0)
            at += behind + more + (value if tag & 7 == LENGTH else 0)
            end = at
    except WireError:
        pass
    return library[start:end]


def _message(raw: bytes) -> Message:
    fields = read_fields(raw)
    maps = set()
    for nested in map(read_fields, _texts(fields, 3)):
        options = _last(nested, 7)
        if isinstance(options, bytes) and _last(read_fields(options), 7) == 1:
            maps.add(_last(nested, 1))
    found: Message = {}
    for field in map(read_fields, _texts(fields, 2)):
        name, number, kind, label, type_name = (_last(field, n) for n in (1, 3, 5, 4, 6))
        assert isinstance(name, bytes) and isinstance(number, int) and isinstance(kind, int)
        word = "message" if kind == _MESSAGE else _KINDS[kind]
        if isinstance(type_name, bytes) and type_name.rpartition(b".")[2] in maps:
            word = "map"
        elif label == _REPEATED:
            word = f"repeated {word}"
        found[number] = (name.decode(), word)
    return found
