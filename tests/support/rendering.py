"""Requests from meanings, written in any of the ways that must not matter.

Options are written to protobuf's wire format here, and flags by the rules of their readers, without a line of the code
that reads them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import operator
import random
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from support.keytable import BUILD, COMPILE, DEBUG, KeyTable
from support.meanings import (
    ASSIGNMENT,
    BUILD_OPTIONS,
    CONTENTS,
    DEBUG_OPTIONS,
    FOLDERS,
    ORDINAL,
    OVERRIDES,
    PLAIN,
    PROCESS,
    ROADS,
    XLA_ROADS,
    FlagsMeaning,
    Meaning,
    Value,
)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_BACKEND_EXTRA: Final = 500
_COPIES: Final = 3
_OVERRIDE_NUMBERS: Final = {"string": 1, "bool": 2, "int64": 3, "double": 4}
_ELSEWHERE: Final = ("HOME", "USER", "HOSTNAME", "MASTER_PORT", "RUN_ID", "PWD", "JAX_PLATFORMS_MADE_UP", "TFX_FLAGS")


class Noise(enum.IntFlag):
    """Ways to write one meaning otherwise."""

    NONE = 0
    OPTION_ORDER = enum.auto()
    MAP_ORDER = enum.auto()
    NUMBER_FORMS = enum.auto()
    PACKING = enum.auto()
    GIVEN_TWICE = enum.auto()
    SPLIT_MESSAGES = enum.auto()
    DUMP_OPTIONS = enum.auto()
    POSITIONS = enum.auto()
    FLAG_ORDER = enum.auto()
    FLAG_SPELLING = enum.auto()
    FLAG_REPEATED = enum.auto()
    DUMP_FLAGS = enum.auto()
    FLAG_FILES = enum.auto()
    COPIED_FILES = enum.auto()
    OTHER_VARIABLES = enum.auto()
    JOB_OPTIONS = enum.auto()
    PYTHON_ORDER = enum.auto()
    TARGET_NAME = enum.auto()
    PROGRAM_TEXT = enum.auto()


EVERY_NOISE: Final = functools.reduce(operator.or_, Noise)


@dataclass(frozen=True, slots=True)
class Written:
    """A request as raw material: what a process would have in hand."""

    program: bytes
    options: bytes
    environ: dict[str, str]
    argv: list[str]
    plugin: dict[str, Any]
    extras: dict[str, Any]
    target: tuple[str, tuple[tuple[str, str], ...], bool]
    executable_format: str

    def looks_like(self, other: Written) -> bool:
        """Nothing of it was written otherwise."""
        orders = [(list(one.environ.items()), repr(one.plugin), repr(one.extras)) for one in (self, other)]
        return self == other and orders[0] == orders[1]


class World:
    """The folder with the files that requests name.

    Args:
        folder: new, or of another process's world with the same files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[Path, bytes] = {}
        for copy in range(_COPIES):
            for number, content in enumerate(CONTENTS):
                self._write(folder / f"copy{copy}" / f"table{number}.{copy}", content)
            for number, files in enumerate(FOLDERS):
                for name, content in files.items():
                    self._write(folder / f"copy{copy}" / f"profiles{number}" / name, content)

    def path(self, value: Value, rng: random.Random, noise: Noise) -> str:
        """Of a file or folder that a value stands for."""
        copy = rng.randrange(_COPIES) if noise & Noise.COPIED_FILES else 0
        match value:
            case ("content", number):
                return str(self.folder / f"copy{copy}" / f"table{number}.{copy}")
            case ("folder", number):
                return str(self.folder / f"copy{copy}" / f"profiles{number}")
            case ("listing", number):
                listing = "".join(f"{len(n)}:{n}{hashlib.sha256(c).hexdigest()}" for n, c in FOLDERS[number].items())
                path = self.folder / f"listing{number}"
                self._write(path, listing.encode())
                return str(path)
            case ("path", slot, number):
                path = self.folder / "slots" / str(slot)
                self._write(path, CONTENTS[number])
                return str(path)
        raise ValueError(value)

    def flag_file(self, lines: Sequence[str]) -> str:
        """A file of flags, one a line or as the one line that it is."""
        text = "\n".join(lines).encode()
        path = self.folder / "flags" / hashlib.sha256(text).hexdigest()[:16]
        self._write(path, text)
        return str(path)

    def _write(self, path: Path, content: bytes) -> None:
        if self._written.get(path) != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._written[path] = content

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Writer:
    """Writes meanings.

    Args:
        programs: every way to write each program of the library; the first is the plain one.
    """

    def __init__(self, table: KeyTable, world: World, programs: Mapping[str, Sequence[bytes]]) -> None:
        self._table = table
        self._world = world
        self._programs = programs
        self._booleans = table.booleans
        self._dump_fields = [n for n in sorted(table.fields[DEBUG]) if table.is_dropped(DEBUG, n)]

    def write(self, meaning: Meaning, rng: random.Random, noise: Noise = Noise.NONE) -> Written:
        """A request of that meaning."""
        ways = self._programs[meaning.program]
        program = rng.choice(ways) if noise & Noise.PROGRAM_TEXT else ways[0]
        environ, argv = self._surroundings(meaning, rng, noise)
        plugin = [(name, self._python(value, rng, noise)) for name, value in meaning.plugin]
        extras = [(name, self._python(value, rng, noise)) for name, value in meaning.extras]
        if noise & Noise.JOB_OPTIONS:
            plugin += [(name, rng.random()) for name in self._table.dropped_plugin_options if rng.random() < 0.7]
        parts = [*meaning.parts]
        if noise & Noise.PYTHON_ORDER:
            for items in (plugin, extras, parts):
                rng.shuffle(items)
        name = f"anything {rng.random()}" if noise & Noise.TARGET_NAME else "target"
        return Written(
            program=program,
            options=_Options(self._table, self._world, self._dump_fields, rng, noise).write(meaning),
            environ=environ,
            argv=argv,
            plugin=dict(plugin),
            extras=dict(extras),
            target=(name, tuple(parts), meaning.independent),
            executable_format=meaning.executable_format,
        )

    # ---- flags and variables -----------------------------------------------------------------------------------------

    def _surroundings(self, meaning: Meaning, rng: random.Random, noise: Noise) -> tuple[dict[str, str], list[str]]:
        flags = dict(meaning.flags)
        environ: list[tuple[str, str]] = []
        argv = ["train.py"]
        for road in ROADS:
            words = self._words(road, flags.get(road, FlagsMeaning()), rng, noise)
            if road == "argv":
                argv += words
            elif text := self._joined(road, words, flags.get(road, FlagsMeaning()).rest, rng, noise):
                environ.append((road, text))
        environ += [(name, self._text(value, rng, noise)) for name, value in meaning.variables]
        if noise & Noise.OTHER_VARIABLES:
            environ += [(n, f"/x/{rng.random()}") for n in self._table.dropped_variables if rng.random() < 0.5]
            environ += [(name, f"/home/{rng.random()}") for name in _ELSEWHERE]
            argv = [argv[0], *(["--steps=3"] * rng.randint(0, 2)), *argv[1:], "--lr", "run7"]
            rng.shuffle(environ)
        return dict(environ), argv

    def _words(self, road: str, flags: FlagsMeaning, rng: random.Random, noise: Noise) -> list[str]:
        """The flags as the words of a command line, quoted where the road has quotes."""
        given: list[tuple[str, Value | None]] = [*flags.flags]
        sets_others = any(name in self._table.ordered_flags for name, _ in given)
        if not flags.ordered:
            given = self._reordered(given, rng, noise)
        if noise & Noise.DUMP_FLAGS and (not flags.ordered or sets_others) and not flags.rest:
            for name in rng.sample(self._table.dropped_flags, rng.randint(1, 4)):
                given.insert(rng.randint(0, len(given)), (name, ("text", rng.choice(("1", "/tmp/x", "true", "a=b")))))
        plainly = flags.ordered or not noise & Noise.FLAG_SPELLING
        return [self._word(road, name, value, rng, noise, plainly=plainly) for name, value in given]

    @staticmethod
    def _reordered(
        given: list[tuple[str, Value | None]], rng: random.Random, noise: Noise
    ) -> list[tuple[str, Value | None]]:
        """Other places for different flags, and earlier numbers for one that ends with a number."""
        groups: dict[str, list[tuple[str, Value | None]]] = {}
        for name, value in given:
            groups.setdefault(name, []).append((name, value))
        if noise & Noise.FLAG_REPEATED:
            for name, group in groups.items():
                if len(group) == 1 and is_plain(group[0][1]):
                    group[:0] = [(name, ("text", rng.choice(("0", "1", "true", "7"))))] * rng.randint(1, 3)
        if noise & Noise.FLAG_ORDER:
            return interleaved(list(groups.values()), rng)
        return [item for group in groups.values() for item in group]

    def _word(
        self, road: str, name: str, value: Value | None, rng: random.Random, noise: Noise, *, plainly: bool
    ) -> str:
        if name == "=":  # a word that is no flag
            return self._text(value or ("text", ""), rng, noise)
        dashes = "--" if plainly or road in XLA_ROADS or rng.random() < 0.7 else "-"
        if value is None:
            return f"{dashes}{name}"
        text = self._text(value, rng, noise)
        if road not in XLA_ROADS:
            return f"{dashes}{name}={text}"
        if not plainly and name in self._booleans and text in ("true", "false") and rng.random() < 0.5:
            text = "1" if text == "true" else "0"
        if not plainly and text == "true" and rng.random() < 0.5:
            return f"{dashes}{name}"
        return f"{dashes}{name}={quoted(text, rng, plainly=plainly)}"

    def _joined(self, road: str, words: list[str], rest: str, rng: random.Random, noise: Noise) -> str:
        spelling = bool(noise & Noise.FLAG_SPELLING)
        if road in XLA_ROADS:
            white = [rng.choice((" ", "  ", "\t", "\n", " \r\n ")) if spelling else " " for _ in words]
            text = "".join(space + word for space, word in zip(white, words, strict=True))[0 if spelling else 1 :]
            text += f" {rest}" if rest else ""
            by_file = noise & Noise.FLAG_FILES and words and rng.random() < 0.7
            return self._world.flag_file([text]) if by_file else text
        if noise & Noise.FLAG_FILES and len(words) > 1 and all(word.startswith("-") and "=" in word for word in words):
            start, end = sorted(rng.sample(range(len(words) + 1), 2))
            words = [*words[:start], f"--flagfile={self._world.flag_file(words[start:end])}", *words[end:]]
        return ("  " if spelling and rng.random() < 0.5 else " ").join(words)

    def _text(self, value: Value, rng: random.Random, noise: Noise) -> str:
        return str(value[1]) if value[0] == "text" else self._world.path(value, rng, noise)

    # ---- Python values -----------------------------------------------------------------------------------------------

    def _python(self, value: Value, rng: random.Random, noise: Noise) -> Any:
        turned = bool(noise & Noise.PYTHON_ORDER)
        match value[0]:
            case "none":
                return None
            case "pyfloat":
                return float(value[1])
            case "list":
                items = [self._python(item, rng, noise) for item in value[1]]
                return tuple(items) if turned and rng.random() < 0.5 else items
            case "set":
                items = [self._python(item, rng, noise) for item in value[1]]
                return frozenset(items) if turned and rng.random() < 0.5 else set(items)
            case "dict":
                pairs = [(name, self._python(item, rng, noise)) for name, item in value[1]]
                if turned:
                    rng.shuffle(pairs)
                return dict(pairs)
        return value[1]


def quoted(text: str, rng: random.Random, *, plainly: bool) -> str:
    """A value as XLA's reader takes it."""
    ways = []
    if text and not set(text) & set(" \t\r\n") and text[0] not in "'\"":
        ways.append(text)
    if "'" not in text:
        ways.append(f"'{text}'")
    ways.append('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')
    return ways[0] if plainly else rng.choice(ways)


def is_plain(value: Value | None) -> bool:
    """Whether a flag with this value counts with its last value alone."""
    return value is None or (value[0] == "text" and PLAIN.fullmatch(value[1]) is not None)


def interleaved(groups: list[list[Any]], rng: random.Random) -> list[Any]:
    """All items, those of one group in their order."""
    order = [number for number, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    left = [iter(group) for group in groups]
    return [next(left[number]) for number in order]


class _Options:
    """A CompileOptionsProto in the making."""

    def __init__(self, table: KeyTable, world: World, dump_fields: list[int], rng: random.Random, noise: Noise) -> None:
        self._table = table
        self._world = world
        self._dump_fields = dump_fields
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
                levels[DEBUG] += [self._dump_field(n) for n in self._rng.sample(self._dump_fields, 3)]
        if DEBUG in meaning.levels:
            levels[BUILD].append(self._nested(DEBUG_OPTIONS, levels[DEBUG]))
        if BUILD in meaning.levels or levels[BUILD]:
            levels[COMPILE].append(self._nested(BUILD_OPTIONS, levels[BUILD]))
        return b"".join(self._arranged(levels[COMPILE]))

    def _arranged(self, groups: list[list[bytes]]) -> list[bytes]:
        if self._noise & Noise.OPTION_ORDER:
            return interleaved(groups, self._rng)
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

    def _plainly(self) -> _Options:
        """Writes numbers in one way only, for what is kept as it stands."""
        return _Options(self._table, self._world, self._dump_fields, self._rng, self._noise & ~Noise.NUMBER_FORMS)

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
