"""CompileOptionsProto from a meaning, on protobuf's wire format, without a line of the code that reads it."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

from support.pairs.keytable import BUILD, COMPILE, DEBUG, KeyTable
from support.pairs.meanings import ASSIGNMENT, BUILD_OPTIONS, DEBUG_OPTIONS, ORDINAL, OVERRIDES, PROCESS, Meaning, Value
from support.pairs.noise import Noise, World, riffled

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BACKEND_EXTRA: Final = 500
_OVERRIDE_NUMBERS: Final = {"string": 1, "bool": 2, "int64": 3, "double": 4}


class OptionsWriter:
    """A CompileOptionsProto in the making."""

    def __init__(self, table: KeyTable, world: World, rng: random.Random, noise: Noise) -> None:
        self._table = table
        self._world = world
        self._rng = rng
        self._noise = noise

    def write(self, meaning: Meaning) -> bytes:
        levels: dict[str, list[list[bytes]]] = {COMPILE: [], BUILD: [], DEBUG: []}
        for (level, number), value in meaning.fields:
            levels[level].append(self._field(level, number, value))
        for level, number, wire_type, value in meaning.strange:
            levels[level].append([self._strange(number, wire_type, value)])
        levels[BUILD] += self._positions(meaning)
        levels[COMPILE].append(self._overrides(meaning))
        if self._noise & Noise.DUMP_OPTIONS:
            levels[COMPILE].append([self._number(9, self._rng.randrange(2))])
            if DEBUG in meaning.levels:
                levels[DEBUG] += [self._dump_field(n) for n in self._rng.sample(self._table.dropped_debug_options, 3)]
        if DEBUG in meaning.levels:
            levels[BUILD].append(self._nested(DEBUG_OPTIONS, levels[DEBUG]))
        if BUILD in meaning.levels or levels[BUILD]:
            levels[COMPILE].append(self._nested(BUILD_OPTIONS, levels[BUILD]))
        return b"".join(self._arranged(levels[COMPILE]))

    def _arranged(self, groups: list[list[bytes]]) -> list[bytes]:
        if self._noise & Noise.OPTION_ORDER:
            return riffled(groups, self._rng)
        return [piece for group in groups for piece in group]

    def _nested(self, number: int, groups: list[list[bytes]]) -> list[bytes]:
        """A message, or its pieces: readers join them."""
        pieces = self._arranged(groups)
        cuts = [0, len(pieces)]
        if self._noise & Noise.SPLIT_MESSAGES:
            cuts = sorted([*cuts, *(self._rng.randint(0, len(pieces)) for _ in range(2))])
        return [self._bytes(number, b"".join(pieces[a:b])) for a, b in itertools.pairwise(cuts)]

    def _field(self, level: str, number: int, value: Value) -> list[bytes]:
        kind = self._table.fields[level][number][1]
        repeated, _, element = kind.rpartition(" ")
        if value[0] == "map":
            entries = [self._map_entry(number, key, self._text(item)) for key, item in value[1]]
            if self._noise & Noise.DUMP_OPTIONS and number == _BACKEND_EXTRA:
                entries.append(self._map_entry(number, self._rng.choice(self._table.dropped_flags), b"x"))
            if self._noise & Noise.MAP_ORDER:
                self._rng.shuffle(entries)
            return entries
        if repeated:
            return self._list(number, element, value[1])
        if value[0] == "message":
            return self._message(number, value)
        found = [self._single(number, element, value)]
        if self._noise & Noise.GIVEN_TWICE and element in ("bool", "int32", "int64", "enum", "string", "bytes"):
            earlier = self._bytes(number, b"before") if element in ("string", "bytes") else self._number(number, 5)
            found.insert(0, earlier)
        return found

    def _message(self, number: int, value: Value) -> list[bytes]:
        """A message that is kept as it stands: its pieces may be apart, and their order and spelling stay."""
        plain = self._plainly()
        pieces = [plain._number(inner, each) for inner, each in value[1]]
        at = self._rng.randint(0, len(pieces)) if self._noise & Noise.SPLIT_MESSAGES else 0
        whole = [pieces[:at], pieces[at:]] if at else [pieces]
        return [self._bytes(number, b"".join(each)) for each in whole]

    def _plainly(self) -> OptionsWriter:
        """Writes numbers in one way only, for what is kept as it stands."""
        return OptionsWriter(self._table, self._world, self._rng, self._noise & ~Noise.NUMBER_FORMS)

    def _list(self, number: int, element: str, values: Iterable[Value]) -> list[bytes]:
        single = [self._single(number, element, value) for value in values]
        packable = element in ("bool", "int32", "int64", "enum")
        if not packable or not self._noise & Noise.PACKING:
            return single
        at = self._rng.randint(0, len(single))
        packed = b"".join(self._varint(value[1]) for value in list(values)[at:])
        return [*single[:at], self._bytes(number, packed)]

    def _single(self, number: int, element: str, value: Value) -> bytes:
        match element:
            case "float":
                return self._tag(number, _FIXED32) + struct.pack("<I", value[1])
            case "double":
                return self._tag(number, _FIXED64) + struct.pack("<Q", value[1])
            case "string":
                return self._bytes(number, self._text(value))
            case "bytes":
                return self._bytes(number, value[1])
            case "message":
                plain = self._plainly()
                return self._bytes(number, b"".join(plain._number(inner, each) for inner, each in value[1]))
        return self._number(number, int(value[1]), narrow=element in ("int32", "enum"))

    def _text(self, value: Value) -> bytes:
        if value[0] == "text":
            return str(value[1]).encode()
        return self._world.path(value, self._rng, self._noise).encode()

    def _map_entry(self, number: int, key: str, value: bytes) -> bytes:
        return self._bytes(number, self._bytes(1, key.encode()) + self._bytes(2, value))

    def _overrides(self, meaning: Meaning) -> list[bytes]:
        entries = []
        for flag, (_, kind, value) in meaning.overrides:
            entries.append(self._map_entry(OVERRIDES, flag, self._single(_OVERRIDE_NUMBERS[kind], kind, value)))
        if self._noise & Noise.DUMP_OPTIONS:
            entries.append(
                self._map_entry(OVERRIDES, self._rng.choice(self._table.dropped_flags), self._bytes(1, b"x"))
            )
        if self._noise & Noise.MAP_ORDER:
            self._rng.shuffle(entries)
        return entries

    def _positions(self, meaning: Meaning) -> list[list[bytes]]:
        """Devices, ordinal and process: for a target that depends on none of them, any will do."""
        rng, groups = self._rng, []
        other = bool(self._noise & Noise.POSITIONS)
        match meaning.assignment:
            case ("rows", rows):
                groups.append([self._assignment(rows)])
            case ("logical", replicas, computations):
                devices = rng.sample(range(64), replicas * computations) if other else range(replicas * computations)
                rows = [list(devices)[i * replicas : (i + 1) * replicas] for i in range(computations)]
                groups.append([self._assignment(rows)])
        if meaning.independent and other and BUILD in meaning.levels:
            groups.append([self._number(ORDINAL, rng.randint(-1, 9))])
            groups.append([self._number(PROCESS, rng.randint(0, 9))])
        return groups

    def _assignment(self, rows: Sequence[Sequence[int]]) -> bytes:
        plain = self._plainly()
        body = plain._number(1, len(rows[0])) + plain._number(2, len(rows))
        for row in rows:
            body += plain._bytes(3, plain._bytes(1, b"".join(plain._varint(device) for device in row)))
        return self._bytes(ASSIGNMENT, body)

    def _dump_field(self, number: int) -> list[bytes]:
        kind = self._table.fields[DEBUG][number][1]
        return [self._bytes(number, b"/tmp/x") if kind == "string" else self._number(number, self._rng.randrange(3))]

    def _strange(self, number: int, wire_type: int, value: Any) -> bytes:
        if wire_type == _VARINT:
            return self._number(number, value)
        if wire_type == _LENGTH:
            return self._bytes(number, value)
        return self._tag(number, wire_type) + value

    def _tag(self, number: int, wire_type: int) -> bytes:
        return self._varint(number << 3 | wire_type)

    def _number(self, number: int, value: int, *, narrow: bool = False) -> bytes:
        if narrow and value < 0 and self._noise & Noise.NUMBER_FORMS and self._rng.random() < 0.5:
            value &= 0xFFFFFFFF  # a reader takes the low 32 bits
        return self._tag(number, _VARINT) + self._varint(value)

    def _bytes(self, number: int, value: bytes) -> bytes:
        return self._tag(number, _LENGTH) + self._varint(len(value)) + value

    def _varint(self, value: int) -> bytes:
        if 0 <= value < 0x80 and not self._noise & Noise.NUMBER_FORMS:
            return bytes((value,))
        value &= (1 << 64) - 1
        out = bytearray()
        while value > 0x7F:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        out.append(value)
        if self._noise & Noise.NUMBER_FORMS and len(out) < 8 and self._rng.random() < 0.3:
            out[-1] |= 0x80  # more bytes than it needs
            out += b"\x80" * self._rng.randint(0, 8 - len(out)) + b"\x00"
        return bytes(out)
