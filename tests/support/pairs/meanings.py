"""What a request means, apart from how it is written: made at random, changed in one component, and never parsed.

A `Meaning` is what the generator knows, so it needs no code under test to say whether two requests are equal. How a
meaning is written down, in all ways that must not matter, is `rendering`'s.

Values are tuples that begin with what they are: `("bool", True)`, `("int", 3)`, `("float", bits)`, `("text", "a")`,
`("bytes", b"")`, `("list", (...))`, `("map", (("key", value), ...))`, `("message", ((number, integer), ...))`; and for
texts that name files `("content", n)` and `("folder", n)`, of which nothing counts but what is in them, and
`("path", slot, n)`, where path and content count; `("listing", n)` is a file with what a folder's listing says.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from dataclasses import dataclass, replace
from typing import Any, Final

from support.pairs.keytable import BUILD, COMPILE, DEBUG, KeyTable

Value = tuple[Any, ...]

ROADS: Final = ("XLA_FLAGS", "TF_XLA_FLAGS", "LIBTPU_INIT_ARGS", "argv")
XLA_ROADS: Final = ROADS[:2]
CONTENTS: Final = tuple(b"content %d" % number for number in range(6))
FOLDERS: Final = tuple({"a": b"1", "b": b"%d" % number} for number in range(3))

OVERRIDES, BUILD_OPTIONS, DEBUG_OPTIONS = 7, 3, 3
ORDINAL, ASSIGNMENT, PROCESS = 1, 9, 22
SPECIAL: Final = {(COMPILE, OVERRIDES), (COMPILE, BUILD_OPTIONS), (BUILD, DEBUG_OPTIONS), (BUILD, ASSIGNMENT)}
PLAIN: Final = re.compile(r"true|false|[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
"""What docs/key.md calls booleans and numbers."""

_FOLDER_FLAG: Final = "xla_gpu_pgle_profile_file_or_directory_path"


@dataclass(frozen=True, slots=True)
class FlagsMeaning:
    """The flags of one road.

    Args:
        flags: name and value of each, None for one without a value. In order where `ordered`, else by name, and each
            name's values in order.
        ordered: the order of different flags counts.
        rest: what XLA reads no further than.
    """

    flags: tuple[tuple[str, Value | None], ...] = ()
    ordered: bool = False
    rest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """All that a request means. Two are equal where their requests must have one key.

    Args:
        program: its name in the library of programs.
        parts: of the target, sorted.
        independent: executables do not depend on positions.
        fields: options by level and number, sorted; without those that are left out.
        overrides: of `env_option_overrides`, sorted by flag.
        strange: level, number, wire type and value of fields that no descriptor knows.
        levels: which of build options and debug options are there at all.
        assignment: rows of devices, or for `independent` the numbers of replicas and computations; empty for none.
        flags: by road; a road without any is left out.
        plugin, extras: Python values.
    """

    program: str
    executable_format: str
    parts: tuple[tuple[str, str], ...]
    independent: bool = False
    fields: tuple[tuple[tuple[str, int], Value], ...] = ()
    overrides: tuple[tuple[str, Value], ...] = ()
    strange: tuple[tuple[str, int, int, Any], ...] = ()
    levels: tuple[str, ...] = ()
    assignment: tuple[Any, ...] = ()
    flags: tuple[tuple[str, FlagsMeaning], ...] = ()
    variables: tuple[tuple[str, Value], ...] = ()
    plugin: tuple[tuple[str, Value], ...] = ()
    extras: tuple[tuple[str, Value], ...] = ()

    def with_field(self, level: str, number: int, value: Value | None) -> Meaning:
        """With one option set, or for None left out."""
        fields = {name: old for name, old in self.fields if name != (level, number)}
        if value is not None:
            fields[level, number] = value
        above = {COMPILE: (), BUILD: (BUILD,), DEBUG: (BUILD, DEBUG)}[level]
        levels = tuple(sorted({*self.levels, *above}))
        return replace(self, fields=tuple(sorted(fields.items())), levels=levels)

    def with_flags(self, road: str, flags: FlagsMeaning) -> Meaning:
        roads = dict(self.flags) | {road: flags}
        return replace(self, flags=tuple(sorted((r, f) for r, f in roads.items() if f.flags or f.rest)))

    def with_item(self, group: str, name: str, value: Value | None) -> Meaning:
        """With one variable, plugin option or extra set, or for None left out."""
        items = dict(getattr(self, group))
        items.pop(name, None)
        if value is not None:
            items[name] = value
        return replace(self, **{group: tuple(sorted(items.items()))})


class Maker:
    """Makes meanings, and changes them.

    Args:
        programs: names in the library.
    """

    def __init__(self, table: KeyTable, rng: random.Random, programs: list[str]) -> None:
        self.table = table
        self.rng = rng
        self.programs = programs
        self._flag_names = sorted(
            {name for name, _ in table.fields[DEBUG].values()} - {*table.dropped_flags, *table.ordered_flags}
        )
        self._slots = itertools.count()

    def slot(self) -> int:
        """For a file of its own."""
        return next(self._slots)

    # ---- values ------------------------------------------------------------------------------------------------------

    def value(self, kind: str, name: str) -> Value:
        """Any value of a field of that kind."""
        rng = self.rng
        repeated, _, element = kind.rpartition(" ")
        if repeated:
            return ("list", tuple(self.value(element, name) for _ in range(rng.randint(1, 4))))
        match element:
            case "bool":
                return ("bool", rng.random() < 0.5)
            case "int32" | "enum":
                return ("int", rng.choice((0, 1, 2, 3, -1, 7, 255, 1 << 20, -(1 << 31), (1 << 31) - 1)))
            case "int64":
                return ("int", rng.choice((0, 1, 2, -1, 300, 1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1)))
            case "float":
                return ("float", rng.choice((0, 1 << 31, 0x3F800000, 0x3F800001, 0x7F800000, 0x7FC00001, 0x7FC00000)))
            case "double":
                return ("double", rng.choice((0, 1 << 63, 0x3FF0000000000000, 0x3FF0000000000001)))
            case "bytes":
                return ("bytes", rng.randbytes(rng.randint(0, 40)))
            case "message":
                return ("message", tuple((rng.randint(1, 30), rng.randint(0, 500)) for _ in range(rng.randint(1, 4))))
            case "map":
                names = [*rng.sample(("a", "b", "c", "xla_other", "v=1"), rng.randint(1, 3)), self._dump_word(name)]
                return ("map", tuple(sorted((key, self.text(key)) for key in names if key)))
        return self.text(name)

    def _dump_word(self, name: str) -> str:
        """A key that is left out of maps of flags, and means something in the others."""
        is_of_flags = name in ("xla_backend_extra_options", "env_option_overrides")
        return "" if is_of_flags or self.rng.random() < 0.7 else self.rng.choice(("v", "xla_dump_to", "log_dir"))

    def text(self, name: str, *, on_command_line: bool = False) -> Value:
        """A text for an option or flag of that name, which may name a file or look as if it did."""
        rng, chosen = self.rng, self.rng.random()
        known = name in self.table.file_flags
        if known and chosen < 0.5:
            if name == _FOLDER_FLAG and rng.random() < 0.4:
                return ("folder", rng.randrange(len(FOLDERS)))
            return ("content", rng.randrange(len(CONTENTS)))
        if not known and chosen < 0.05:
            return ("path", self.slot(), rng.randrange(len(CONTENTS)))
        read = f"content:sha256:{hashlib.sha256(rng.choice(CONTENTS)).hexdigest()}"
        words = [
            *("a", "b", "cse,dce", "v5e", "x=y", "--z", "-", "[1:a]", "no[1:a]", "[3:a b]", "true", "false", "0", "1"),
            *("1.5", "-7", "1e5", "%41", "#2:a", "{a=b}", "A" * 100, "", "content:", read, f"{read} literal"),
            *("string:1", "float(nan)", "*rest*", f"folder:sha256:{'0' * 64}", f"/nowhere {read}", "a;b", "a,b"),
        ]
        more = ["a b", " a", "a ", "ü", "a'b", 'a"b', "a\\b", "\t", "a\nb", "\x7f", "\\", "''"]
        if not on_command_line:
            words += more
        words = [word for word in words if not on_command_line or (word and not set(word) & set(" \t\n'\"\\"))]
        return ("text", rng.choice(words))

    def python_value(self, depth: int = 0) -> Value:
        """A value of a plugin option or extra, told apart by its type."""
        rng = self.rng
        scalars: list[Value] = [
            *(("none",), ("bool", True), ("bool", False), ("int", 0), ("int", 1), ("int", -1), ("int", 1 << 70)),
            *(("pyfloat", "1.0"), ("pyfloat", "0.0"), ("pyfloat", "-0.0"), ("pyfloat", "nan"), ("pyfloat", "1e-300")),
            *(("str", ""), ("str", "1"), ("str", "true"), ("str", 'a"b'), ("str", "ü"), ("str", "a,b"), ("str", "]")),
            *(("bytes", b""), ("bytes", b"1")),
        ]
        if depth > 2 or rng.random() < 0.6:
            return rng.choice(scalars)
        items = [self.python_value(depth + 1) for _ in range(rng.randint(0, 3))]
        kind = rng.choice(("list", "set", "dict"))
        if kind == "dict":
            return ("dict", tuple(sorted({str(number): item for number, item in enumerate(items)}.items())))
        if kind == "set":
            return ("set", tuple(sorted({item for item in items if item[0] == "str"})))
        return ("list", tuple(items))

    # ---- whole meanings ----------------------------------------------------------------------------------------------

    def meaning(self) -> Meaning:
        """Any meaning, with a few of everything."""
        rng, table = self.rng, self.table
        independent = rng.random() < 0.5
        made = Meaning(
            program=rng.choice(self.programs),
            executable_format=rng.choice(("pjrt", "pjrt-ifrt")),
            parts=tuple(sorted(self._parts().items())),
            independent=independent,
        )
        for level, most in ((COMPILE, 2), (BUILD, 4), (DEBUG, 5)):
            for number in rng.sample(table.kept[level], rng.randint(0, most)):
                if (level, number) not in SPECIAL and not (independent and (level, number) in _POSITIONS):
                    made = made.with_field(level, number, self.value(*self._kind_and_name(level, number)))
        if rng.random() < 0.3:
            made = replace(made, assignment=self.assignment(independent))
            made = made.with_field(BUILD, 4, ("int", 1))
        names = [self.flag_name() for _ in range(rng.choice((0, 0, 0, 1, 2, 3)))]
        overrides = {name: self.override(name) for name in names}
        made = replace(made, overrides=tuple(sorted(overrides.items())))
        for road in ROADS:
            if rng.random() < 0.4:
                made = made.with_flags(road, self.flags(road))
        for number in range(rng.choice((0, 0, 1, 2))):
            made = made.with_item("variables", self.variable(), self.text("", on_command_line=number == 1))
        for group in ("plugin", "extras"):
            for _ in range(rng.choice((0, 0, 1, 2))):
                made = made.with_item(group, rng.choice("abcdef"), self.python_value())
        return made

    def _kind_and_name(self, level: str, number: int) -> tuple[str, str]:
        name, kind = self.table.fields[level][number]
        return kind, name

    def _parts(self) -> dict[str, str]:
        rng = self.rng
        return {
            "platform": rng.choice(("cpu", "tpu")),
            "platform_version": f"libtpu {rng.randrange(9)}",
            "compiler": hashlib.sha256(b"%d" % rng.randrange(9)).hexdigest(),
            "device_kind": rng.choice(("TPU v5 lite", "TPU v6 lite")),
            "topology": rng.choice(("2x2", "2x4", "4x4")),
        }

    def flag_name(self) -> str:
        """Of a flag that counts, known or not; none that names a file, which has its own pairs."""
        if self.rng.random() < 0.3:
            return f"xla_made_up_{self.rng.randrange(50)}"
        return self.rng.choice(self._flag_names)

    def override(self, name: str) -> Value:
        """A value of `env_option_overrides` for that flag."""
        kind = self.rng.choice(("string", "bool", "int64", "double"))
        return ("override", kind, self.value(kind, name))

    def assignment(self, independent: bool) -> tuple[Any, ...]:
        replicas, computations = self.rng.randint(1, 3), self.rng.randint(1, 3)
        if independent:
            return ("logical", replicas, computations)
        devices = self.rng.sample(range(16), replicas * computations)
        return ("rows", tuple(tuple(devices[i * replicas : (i + 1) * replicas]) for i in range(computations)))

    def variable(self) -> str:
        prefix = self.rng.choice(("TPU_", "LIBTPU_", "XLA_", "PJRT_"))
        return self.rng.choice((f"{prefix}MADE_UP_{self.rng.randrange(9)}", "TF_ENABLE_ONEDNN_OPTS"))

    def flags(self, road: str, *, ordered: bool | None = None) -> FlagsMeaning:
        """Flags of a road."""
        rng = self.rng
        bare = road not in XLA_ROADS  # their reader may take the next word for a flag's value
        names = [self.flag_name() for _ in range(rng.randint(1, 4))]
        if ordered is None:
            ordered = rng.random() < 0.2
        if not ordered:
            found = [(name, self.flag_value(name, road)) for name in dict.fromkeys(names)]
            return normal(FlagsMeaning(tuple(found)), self.table)
        words: list[tuple[str, Value | None]] = [(name, self.flag_value(name, road)) for name in names]
        if bare and rng.random() < 0.5:
            words += [(self.flag_name(), None), ("=", ("text", rng.choice(("0", "1", "a"))))]
        else:
            words.insert(rng.randrange(len(words)), (rng.choice(self.table.ordered_flags), ("text", "true")))
        return FlagsMeaning(tuple(words), ordered=True)

    def flag_value(self, name: str, road: str) -> Value:
        return self.text(name, on_command_line=road not in XLA_ROADS)


_POSITIONS: Final = {(BUILD, ORDINAL), (BUILD, PROCESS)}


def normal(flags: FlagsMeaning, table: KeyTable) -> FlagsMeaning:
    """One form for all that means the same: of booleans and numbers the last one, and `1` for a boolean as `true`; and
    no order where none counts."""
    names = [name for name, _ in flags.flags]
    could_take_a_word = any(value is None for _, value in flags.flags) or "=" in names
    negated = any(f"no{name}" in names for name in names)
    if flags.ordered and (could_take_a_word or negated or set(names) & set(table.ordered_flags)):
        return flags
    groups: dict[str, list[Value]] = {}
    booleans = table.booleans
    for name, value in flags.flags:
        told = ("text", "true") if value is None else value
        if name in booleans and told in (("text", "0"), ("text", "1")):
            told = ("text", "true" if told[1] == "1" else "false")
        groups.setdefault(name, []).append(told)
    for name, values in groups.items():
        if all(value[0] == "text" and PLAIN.fullmatch(value[1]) for value in values):
            groups[name] = values[-1:]
    told_once = tuple((name, value) for name in sorted(groups) for value in groups[name])
    return replace(flags, flags=told_once, ordered=False)
