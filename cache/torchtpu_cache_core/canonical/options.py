"""Key components of a serialised CompileOptionsProto, read by field number.

Source of the tables: the descriptors of `xla/pjrt/proto/compile_options.proto` in jaxlib 0.10.2 and 0.12.0.1; a test
holds them against the installed jaxlib. Rules:

- A field is kept unless its row says otherwise or `rules.DROPPED_FLAGS` names it. Unknown fields are kept, with their
  wire type and raw value.
- The order of different fields has no meaning; the order within one field has, and stays. Packed and unpacked lists
  of numbers are one value, as is a number in more bytes than it needs.
- A singular number or string that stands twice: the last one, as every protobuf reader has it. A singular message
  that stands twice: both, joined, which is how readers merge it.
- Map entries are sorted by key. Entries with one key keep their order, so nothing is merged that a reader could see.
- An explicit default differs from an absent field: a miss at worst, and no real writer emits one where it means
  nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

from torchtpu_cache_core.canonical.debug_options import DEBUG_OPTIONS
from torchtpu_cache_core.canonical.files import Noted, file_value
from torchtpu_cache_core.canonical.rules import DROPPED_FLAGS, TABLE_VERSION
from torchtpu_cache_core.canonical.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    Field,
    WireError,
    floating,
    length_field,
    read_fields,
    read_varint,
    signed,
    varint_field,
)
from torchtpu_cache_core.errors import InvalidRequest
from torchtpu_cache_core.key import Component

MAX_OPTIONS_BYTES: Final = 64 << 20
_MAX_SHOWN_FIELDS: Final = 64  # a key holds 1,024 components
_MAX_SHOWN_BYTES: Final = 1 << 16

KEEP: Final = "keep"
DROP: Final = "drop"
NORMALISE: Final = "normalise where position-independent"

Row = tuple[str, str, str, str]
"""Name, kind, rule, reason (empty for a plain keep)."""

COMPILE_OPTIONS: Final[dict[int, Row]] = {
    1: ("argument_layouts", "repeated message", KEEP, ""),
    2: ("parameter_is_tupled_arguments", "bool", KEEP, ""),
    3: ("executable_build_options", "message", KEEP, "field by field, next table"),
    4: ("compile_portable_executable", "bool", KEEP, ""),
    5: ("profile_version", "int64", KEEP, ""),
    6: ("serialized_multi_slice_config", "bytes", KEEP, ""),
    7: (
        "env_option_overrides",
        "override map",
        KEEP,
        "sorted by flag; flags that are dropped elsewhere are dropped here",
    ),
    8: ("target_config", "message", KEEP, ""),
    9: ("allow_in_place_mlir_modification", "bool", DROP, "says who owns the input, not what is made of it"),
    10: ("matrix_unit_operand_precision", "enum", KEEP, ""),
    11: ("compiler_variant", "string", KEEP, ""),
    12: ("individually_defined_output_indices", "repeated int32", KEEP, ""),
}

BUILD_OPTIONS: Final[dict[int, Row]] = {
    1: ("device_ordinal", "int64", NORMALISE, "which physical device; left out"),
    2: ("result_layout", "message", KEEP, ""),
    3: ("debug_options", "message", KEEP, "one component, flag by flag"),
    4: ("num_replicas", "int64", KEEP, ""),
    5: ("num_partitions", "int64", KEEP, ""),
    6: ("use_spmd_partitioning", "bool", KEEP, ""),
    7: ("use_auto_spmd_partitioning", "bool", KEEP, ""),
    8: ("deduplicate_hlo", "bool", KEEP, ""),
    9: ("device_assignment", "message", NORMALISE, "which physical devices; its shape is kept"),
    10: ("alias_passthrough_params", "bool", KEEP, ""),
    11: ("run_backend_only", "bool", KEEP, ""),
    12: ("allow_spmd_sharding_propagation_to_output", "repeated bool", KEEP, ""),
    13: ("comp_envs", "message", KEEP, ""),
    14: ("fdo_profile", "bytes", KEEP, ""),
    15: ("device_memory_size", "int64", KEEP, ""),
    16: ("auto_spmd_partitioning_mesh_shape", "repeated int64", KEEP, ""),
    17: ("auto_spmd_partitioning_mesh_ids", "repeated int64", KEEP, ""),
    18: ("allow_spmd_sharding_propagation_to_parameters", "repeated bool", KEEP, ""),
    19: ("use_shardy_partitioner", "bool", KEEP, ""),
    20: ("exec_time_optimization_effort", "float", KEEP, ""),
    21: ("memory_fitting_effort", "float", KEEP, ""),
    22: ("process_index", "int64", NORMALISE, "which process of the group; left out"),
    23: ("process_count", "int64", KEEP, ""),
    24: ("optimization_level", "enum", KEEP, ""),
    25: ("memory_fitting_level", "enum", KEEP, ""),
    26: ("slice_size", "int64", KEEP, ""),
    27: ("gpu_topology", "message", KEEP, ""),
}

_BUILD_OPTIONS_FIELD: Final = 3
_DEBUG_OPTIONS_FIELD: Final = 3
_NUM_REPLICAS_FIELD: Final = 4
_NUM_PARTITIONS_FIELD: Final = 5
_SPMD_FIELD: Final = 6
_SHARDY_FIELD: Final = 19

_FLAG_MAPS: Final = frozenset({"env_option_overrides", "xla_backend_extra_options"})
"""Maps whose keys are names of flags; the keys of the others are words of their own."""

_WIRE_TYPES: Final = {
    "bool": VARINT,
    "int32": VARINT,
    "int64": VARINT,
    "enum": VARINT,
    "float": FIXED32,
    "double": FIXED64,
    "string": LENGTH,
    "bytes": LENGTH,
    "message": LENGTH,
    "map": LENGTH,
}
_OVERRIDE_KINDS: Final = {1: "string", 2: "bool", 3: "int64", 4: "double"}
_UNSAFE: Final = re.compile(rb"[^A-Za-z0-9_./:+@ -]")


def options_components(options: bytes, *, position_independent: bool, noted: Noted) -> list[Component]:
    """The components `options.*` of a serialised CompileOptionsProto.

    Options that are no protobuf message become one component, the digest of their bytes: a safe miss.

    Args:
        options: at most 64 MiB.
        position_independent: `Target.position_independent`: only then are device assignment, device ordinal and
            process index normalised.
        noted: gets the files that options name.

    Raises:
        InvalidRequest: the options are over the limit.
        Bypass: an option names a file that cannot be read.
    """
    if len(options) > MAX_OPTIONS_BYTES:
        raise InvalidRequest(f"compile options of {len(options):,} bytes are over {MAX_OPTIONS_BYTES:,}")
    table = Component.of("options.table", TABLE_VERSION)
    try:
        named = dict(_components(options, position_independent=position_independent, noted=noted))
    except WireError:
        return [table, Component.of("options.raw", options)]
    if len(named) > _MAX_SHOWN_FIELDS:
        return [table, Component.of("options.raw", options)]
    return [table, *(Component.of(f"options.{name}", named[name]) for name in named)]


def encode_options(
    *,
    num_replicas: int = 1,
    num_partitions: int = 1,
    use_spmd_partitioning: bool,
    use_shardy_partitioner: bool = False,
) -> bytes:
    """A serialised CompileOptionsProto that says no more than this; compiler defaults hold for the rest."""
    build = (
        varint_field(1, -1)  # no device is meant; absent would mean device 0
        + varint_field(_NUM_REPLICAS_FIELD, num_replicas)
        + varint_field(_NUM_PARTITIONS_FIELD, num_partitions)
    )
    if use_spmd_partitioning:
        build += varint_field(_SPMD_FIELD, 1)
    if use_shardy_partitioner:
        build += varint_field(_SHARDY_FIELD, 1)
    return length_field(_BUILD_OPTIONS_FIELD, build)


def device_count(options: bytes) -> int:
    """Replicas times partitions that the options ask for; 1 where they do not say, or are no CompileOptionsProto."""
    try:
        build = read_fields(_joined(read_fields(options), _BUILD_OPTIONS_FIELD))
    except WireError:
        return 1
    last = {field.number: signed(field.value, 64) for field in build if isinstance(field.value, int)}
    return max(1, last.get(_NUM_REPLICAS_FIELD, 1)) * max(1, last.get(_NUM_PARTITIONS_FIELD, 1))


def _joined(fields: Iterable[Field], number: int) -> bytes:
    return b"".join(f.value for f in fields if f.number == number and isinstance(f.value, bytes))


def _components(options: bytes, *, position_independent: bool, noted: Noted) -> Iterable[tuple[str, str]]:
    fields = read_fields(options)
    yield from _message(fields, COMPILE_OPTIONS, "unknown_", {_BUILD_OPTIONS_FIELD}, position_independent, noted=noted)
    nested = _joined(fields, _BUILD_OPTIONS_FIELD)
    build = read_fields(nested)
    # Present but empty differs from absent for messages, and no component of its fields would say so.
    if any(f.number == _BUILD_OPTIONS_FIELD for f in fields):
        yield "build_options", "present"
    yield from _message(
        build, BUILD_OPTIONS, "build_unknown_", {_DEBUG_OPTIONS_FIELD}, position_independent, noted=noted
    )
    if any(f.number == _DEBUG_OPTIONS_FIELD for f in build):
        yield "debug_options", _debug_options(_joined(build, _DEBUG_OPTIONS_FIELD), noted=noted)


def _message(
    fields: list[Field],
    rows: Mapping[int, Row],
    unknown: str,
    elsewhere: set[int],
    position_independent: bool,
    *,
    noted: Noted,
) -> Iterable[tuple[str, str]]:
    for number, group in _grouped(fields):
        name, kind, rule, _ = rows.get(number, (f"{unknown}{number}", "", KEEP, ""))
        if kind and not _as_declared(kind, group):
            kind = ""
        if number in elsewhere and kind:
            continue
        if kind and (rule == DROP or (rule == NORMALISE and position_independent and name != "device_assignment")):
            continue
        if name == "device_assignment" and kind and position_independent:
            yield name, _device_assignment(b"".join(f.value for f in group if isinstance(f.value, bytes)))
        elif (text := _values(name, kind, group, noted=noted)) is not None:
            yield name, text


def _as_declared(kind: str, group: Iterable[Field]) -> bool:
    repeated, _, element = kind.rpartition(" ")
    allowed = {_WIRE_TYPES[element]} | ({LENGTH} if repeated else set())
    return all(field.wire_type in allowed for field in group)


def _grouped(fields: Iterable[Field]) -> list[tuple[int, list[Field]]]:
    groups: dict[int, list[Field]] = {}
    for field in fields:
        groups.setdefault(field.number, []).append(field)
    return sorted(groups.items())


def _debug_options(raw: bytes, *, noted: Noted) -> str:
    shown = []
    for number, group in _grouped(read_fields(raw)):
        name, kind = DEBUG_OPTIONS.get(number, (str(number), ""))
        if name not in DROPPED_FLAGS and (text := _values(name, kind, group, noted=noted)) is not None:
            shown.append(f"{name}={text}")
    return ";".join(shown)


def _values(name: str, kind: str, group: list[Field], *, noted: Noted) -> str | None:
    """The canonical text of all that one field number holds; None where a reader would find nothing."""
    repeated, _, element = kind.rpartition(" ")
    if kind == "map":
        return _map(name, group, partial(_string, noted=noted))
    if kind == "override map":
        return _map(name, group, partial(_override, noted=noted))
    if repeated:
        group = _unpacked(element, group)
        if not group:
            return None
    matching = bool(kind) and all(f.wire_type == _WIRE_TYPES[element] for f in group)
    if not matching:
        return _strange(group)
    if element == "message" and not repeated:
        return _raw(b"".join(f.value for f in group if isinstance(f.value, bytes)))
    texts = [_scalar(name, element, f.value, noted=noted) for f in (group if repeated else group[-1:])]
    return f"[{','.join(texts)}]" if repeated else texts[0]


def _unpacked(element: str, group: list[Field]) -> list[Field]:
    wire_type = _WIRE_TYPES[element]
    if wire_type == LENGTH:
        return group
    single: list[Field] = []
    for field in group:
        if not isinstance(field.value, bytes) or field.wire_type != LENGTH:
            single.append(field)
            continue
        offset = 0
        while offset < len(field.value):
            if wire_type == VARINT:
                value, offset = read_varint(field.value, offset)
                single.append(Field(field.number, VARINT, value))
            else:
                size = 4 if wire_type == FIXED32 else 8
                if size > len(field.value) - offset:
                    raise WireError("a packed list ends within a value")
                single.append(Field(field.number, wire_type, field.value[offset : offset + size]))
                offset += size
    return single


def _scalar(name: str, kind: str, value: int | bytes, *, noted: Noted) -> str:
    if isinstance(value, int):
        if kind == "bool":
            return "true" if value else "false"
        return str(signed(value, 64 if kind == "int64" else 32))
    if kind in ("float", "double"):
        return floating(value)
    return _string(name, value, noted=noted) if kind == "string" else _raw(value)


def _raw(value: int | bytes) -> str:
    """Text that tells all values apart and holds none of the separators; long values as their digest."""
    if isinstance(value, int):
        return str(value)
    if len(value) > _MAX_SHOWN_BYTES:
        return f"%sha256:{hashlib.sha256(value).hexdigest()}:{len(value)}"
    return _UNSAFE.sub(lambda found: b"%%%02x" % found[0][0], value).decode("ascii")


def _strange(group: Iterable[Field]) -> str:
    """What no known writer emits, as it stands."""
    return "[" + ",".join(f"#{f.wire_type}:{_raw(f.value)}" for f in group) + "]"


def _map(name: str, group: list[Field], value_text: Callable[[str, bytes], str]) -> str | None:
    """Entries sorted by key, or all of them as they stand where one is not what a map's writer emits.

    None where all are dropped, which is the same as a map that is not there.
    """
    entries: list[tuple[bytes, str]] = []
    for field in group:
        try:
            entry = read_fields(field.value) if isinstance(field.value, bytes) and field.wire_type == LENGTH else []
        except WireError:
            entry = []
        if [(f.number, f.wire_type) for f in entry] != [(1, LENGTH), (2, LENGTH)]:
            return _strange(group)
        key, value = (f.value for f in entry if isinstance(f.value, bytes))
        flag = key.decode(errors="replace")
        if flag not in DROPPED_FLAGS or name not in _FLAG_MAPS:
            entries.append((key, value_text(flag, value)))
    if not entries:
        return None
    entries.sort(key=lambda entry: entry[0])
    return "{" + ",".join(f"{_raw(key)}={text}" for key, text in entries) + "}"


def _string(flag: str, value: bytes, *, noted: Noted) -> str:
    try:
        return _raw(file_value(flag, value.decode(), noted=noted).encode())
    except UnicodeDecodeError:
        return _raw(value)


def _override(flag: str, value: bytes, *, noted: Noted) -> str:
    """An OptionOverrideProto: one of string, bool, int and double."""
    try:
        fields = read_fields(value)
    except WireError:
        return f"#{LENGTH}:{_raw(value)}"
    kind = _OVERRIDE_KINDS.get(fields[0].number, "") if len(fields) == 1 else ""
    if not kind or fields[0].wire_type != _WIRE_TYPES[kind]:
        return f"#{LENGTH}:{_raw(value)}"
    return f"{kind}:{_scalar(flag, kind, fields[0].value, noted=noted)}"


def _device_assignment(raw: bytes) -> str:
    """A DeviceAssignmentProto reduced to its shape, or as it stands where that would not be its meaning."""
    fields = read_fields(raw)
    counts = {f.number: f.value for f in fields if isinstance(f.value, int)}
    inner = [read_fields(f.value) for f in fields if f.number == 3 and isinstance(f.value, bytes)]
    rows = [[f.value for f in _unpacked("int64", row)] for row in inner]
    devices = [device for row in rows for device in row]
    replicas, computations = counts.get(1, 0), counts.get(2, 0)
    regular = (
        {f.number for f in fields} == {1, 2, 3}
        and all(f.number == 1 for row in inner for f in row)
        and all(isinstance(device, int) for device in devices)
        and len(rows) == computations
        and all(len(row) == replicas for row in rows)
        and len(set(devices)) == len(devices)
    )
    return f"replicas={replicas};computations={computations};devices=logical" if regular else f"#{LENGTH}:{_raw(raw)}"
