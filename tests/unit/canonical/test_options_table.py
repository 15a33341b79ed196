"""The option tables against the descriptors inside the installed jaxlib."""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

import pytest

from torchtpu_cache_core.canonical.debug_options import DEBUG_OPTIONS
from torchtpu_cache_core.canonical.options import BUILD_OPTIONS, COMPILE_OPTIONS
from torchtpu_cache_core.canonical.rules import DROPPED_FLAGS, FILE_FLAGS, ORDERED_FLAGS
from torchtpu_cache_core.canonical.wire import LENGTH, VARINT, Field, WireError, read_fields, read_varint

# Source: google/protobuf/descriptor.proto.
_KINDS = {1: "double", 2: "float", 3: "int64", 5: "int32", 8: "bool", 9: "string", 12: "bytes", 14: "enum"}
_MESSAGE, _REPEATED = 11, 3

Message = dict[int, tuple[str, str]]


def last(fields: list[Field], number: int) -> bytes | int | None:
    return next((f.value for f in reversed(fields) if f.number == number), None)


def texts(fields: list[Field], number: int) -> list[bytes]:
    return [f.value for f in fields if f.number == number and isinstance(f.value, bytes)]


def file_descriptor(library: mmap.mmap, name: bytes) -> bytes:
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


def message(raw: bytes) -> Message:
    """Number to name and kind, in the table's words."""
    fields = read_fields(raw)
    maps = set()
    for nested in map(read_fields, texts(fields, 3)):
        options = last(nested, 7)
        if isinstance(options, bytes) and last(read_fields(options), 7) == 1:
            maps.add(last(nested, 1))
    found: Message = {}
    for field in map(read_fields, texts(fields, 2)):
        name, number, kind, label, type_name = (last(field, n) for n in (1, 3, 5, 4, 6))
        assert isinstance(name, bytes) and isinstance(number, int) and isinstance(kind, int)
        word = "message" if kind == _MESSAGE else _KINDS[kind]
        if isinstance(type_name, bytes) and type_name.rpartition(b".")[2] in maps:
            word = "map"
        elif label == _REPEATED:
            word = f"repeated {word}"
        found[number] = (name.decode(), word)
    return found


@pytest.fixture(scope="module")
def messages() -> dict[str, Message]:
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("jaxlib is not installed, so there is no descriptor to compare with")
    library = Path(spec.submodule_search_locations[0]) / "libjax_common.so"
    found: dict[str, Message] = {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        for source in (b"xla/xla.proto", b"xla/pjrt/proto/compile_options.proto"):
            for raw in texts(read_fields(file_descriptor(mapped, source)), 4):
                name = last(read_fields(raw), 1)
                if name in (b"DebugOptions", b"CompileOptionsProto", b"ExecutableBuildOptionsProto"):
                    assert isinstance(name, bytes)
                    found[name.decode()] = message(raw)
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("DebugOptions", DEBUG_OPTIONS),
        ("CompileOptionsProto", {n: (r[0], r[1].replace("override map", "map")) for n, r in COMPILE_OPTIONS.items()}),
        ("ExecutableBuildOptionsProto", {n: (row[0], row[1]) for n, row in BUILD_OPTIONS.items()}),
    ],
)
def test_table_agrees_with_jaxlib(messages: dict[str, Message], name: str, table: Message) -> None:
    descriptor = messages[name]
    moved = {n: (table[n], descriptor[n]) for n in table.keys() & descriptor.keys() if table[n] != descriptor[n]}
    assert not moved
    known = {row[0] for row in table.values()}
    assert not [row[0] for n, row in descriptor.items() if n not in table and row[0] in known]
    appeared = {n: row for n, row in descriptor.items() if n not in table}
    assert not [row for row in appeared.values() if row[1] == "map"], "a map field is written in random order"
    for number, (field, kind) in sorted(appeared.items()):
        print(f"{name} has a field that the table does not know: {number} {field} ({kind})")


def test_rules_name_real_options() -> None:
    names = {name for name, _ in DEBUG_OPTIONS.values()}
    absl = {
        "alsologtostderr",
        "log_dir",
        "logtostderr",
        "minloglevel",
        "stderrthreshold",
        "tpu_log_dir",
        "v",
        "vmodule",
    }
    assert set(DROPPED_FLAGS) - names == absl
    assert names >= FILE_FLAGS
    assert ORDERED_FLAGS - names == {"xla_gpu_enable_libnvjitlink", "xla_gpu_graph_level"}
    assert not (set(DROPPED_FLAGS) & (FILE_FLAGS | ORDERED_FLAGS))
