"""Two meanings that differ in one component that matters, of every kind that docs/key.md names."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from support.pairs.keytable import BUILD, COMPILE, DEBUG
from support.pairs.meanings import (
    CONTENTS,
    FOLDERS,
    ORDINAL,
    PROCESS,
    ROADS,
    SPECIAL,
    XLA_ROADS,
    FlagsMeaning,
    Maker,
    Meaning,
    Value,
    normal,
)

Pair = tuple[Meaning, Meaning]

_KNOWN_FILE: Final = "xla_gpu_target_config_filename"
_FOLDER_FLAG: Final = "xla_gpu_pgle_profile_file_or_directory_path"
_ESTIMATOR: Final = 357
"""A map whose keys are no flags."""


class Changes:
    """Makes pairs that must differ. `next` goes round all kinds, so that each comes as often as any other."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._rng: random.Random = maker.rng
        self._round = self._rounds()

    def next(self) -> tuple[str, Pair]:
        """A kind, and a pair of it."""
        return next(self._round)

    def _rounds(self) -> Iterator[tuple[str, Pair]]:
        while True:
            for level in (COMPILE, BUILD, DEBUG):
                for number in self._maker.table.kept[level]:
                    if (level, number) not in SPECIAL:
                        name = self._maker.table.fields[level][number][0]
                        yield f"{level} option {name}", self._option(level, number)
            # There are ten times as many options as all else.
            for _ in range(10):
                for change in self._changes():
                    made = change()
                    if made is not None and made[0] != made[1]:
                        yield _words(change.__name__), made

    def _changes(self) -> list[Callable[[], Pair | None]]:
        return [
            *(self._override, self._override_type, self._override_added, self._unknown_option, self._other_wire_type),
            *(self._option_message_present, self._list_order, self._assignment, self._position),
            *(self._program, self._executable_format, self._target_part, self._target_part_added),
            *(self._flag_value, self._flag_added, self._flag_name, self._flag_road, self._flag_list_order),
            *(self._flag_order_beside_one_that_sets_others, self._word_order, self._words_behind_flags, self._negation),
            *(self._known_file, self._folder, self._unknown_file, self._unknown_path),
            *(self._variable, self._variable_added, self._plugin_option, self._plugin_option_added, self._extra),
            *(self._value_that_poses_as_a_file, self._file_that_poses_as_a_folder, self._flag_that_poses_as_a_group),
            *(self._word_that_poses_as_a_flag, self._end_of_flags, self._option_that_poses_as_a_flag),
        ]

    def _base(self) -> Meaning:
        return self._maker.meaning()

    def _different(self, make: Callable[[], Any], old: Any) -> Any:
        while (new := make()) == old:
            pass
        return new

    # ---- options -----------------------------------------------------------------------------------------------------

    def _option(self, level: str, number: int) -> Pair:
        base = self._base()
        if (level, number) in ((BUILD, ORDINAL), (BUILD, PROCESS)):
            base = replace(base, independent=False, assignment=())
        name, kind = self._maker.table.fields[level][number]
        value = self._maker.value(kind, name)
        one = base.with_field(level, number, value)
        if self._rng.random() < 0.2:
            return one, one.with_field(level, number, None)
        return one, one.with_field(level, number, self._different(lambda: self._maker.value(kind, name), value))

    def _override(self) -> Pair:
        base, flag, kind = (
            self._base(),
            self._maker.flag_name(),
            self._rng.choice(("string", "bool", "int64", "double")),
        )
        value = self._maker.value(kind, flag)
        other = self._different(lambda: self._maker.value(kind, flag), value)
        return _overridden(base, flag, ("override", kind, value)), _overridden(base, flag, ("override", kind, other))

    def _override_type(self) -> Pair:
        ways: list[Value] = [
            ("override", "string", ("text", "1")),
            ("override", "bool", ("bool", True)),
            ("override", "int64", ("int", 1)),
            ("override", "double", ("double", 0x3FF0000000000000)),
        ]
        one, other = self._rng.sample(ways, 2)
        base, flag = self._base(), self._maker.flag_name()
        return _overridden(base, flag, one), _overridden(base, flag, other)

    def _override_added(self) -> Pair:
        base, flag = self._base(), self._maker.flag_name()
        return _overridden(base, flag, None), _overridden(base, flag, self._maker.override(flag))

    def _unknown_option(self) -> Pair:
        level = self._rng.choice((COMPILE, BUILD, DEBUG))
        base = self._base().with_field(level, self._maker.table.kept[level][-1], None)
        number, wire_type = self._rng.randint(900, 999), self._rng.choice((0, 1, 2, 5))
        one, other = (self._strange(wire_type) for _ in range(2))
        return (
            replace(base, strange=((level, number, wire_type, one),)),
            replace(base, strange=((level, number, wire_type, other),) if one != other else ()),
        )

    def _strange(self, wire_type: int) -> Any:
        if wire_type == 0:
            return self._rng.randrange(1 << 64)
        return self._rng.randbytes({1: 8, 5: 4}.get(wire_type, self._rng.randint(0, 20)))

    def _other_wire_type(self) -> Pair:
        """A field that a reader does not find, for it is written as another type."""
        base = self._base().with_field(BUILD, 5, ("int", 4))
        return base, replace(base.with_field(BUILD, 5, None), strange=((BUILD, 5, 2, b"4"),))

    def _option_message_present(self) -> Pair:
        bare = replace(self._base(), fields=(), assignment=(), levels=())
        levels = ((), (BUILD,), tuple(sorted((BUILD, DEBUG))))
        one, other = self._rng.sample(levels, 2)
        return replace(bare, levels=one), replace(bare, levels=other)

    def _list_order(self) -> Pair:
        lists = ((DEBUG, 30), (DEBUG, 258), (DEBUG, 127), (BUILD, 12), (BUILD, 16), (COMPILE, 12))
        fields = self._maker.table.fields
        level, number = self._rng.choice([each for each in lists if each[1] in fields[each[0]]])  # some are newer
        name, kind = fields[level][number]
        one = self._maker.value(kind.rpartition(" ")[2], name)
        other = self._different(lambda: self._maker.value(kind.rpartition(" ")[2], name), one)
        base = self._base()
        return (
            base.with_field(level, number, ("list", (one, other))),
            base.with_field(level, number, ("list", (other, one))),
        )

    def _assignment(self) -> Pair:
        """Other devices where they matter, another shape where it alone does."""
        base = self._base().with_field(BUILD, 4, ("int", 1))
        one = self._maker.assignment(base.independent)
        other = self._different(lambda: self._maker.assignment(base.independent), one)
        if not base.independent and self._rng.random() < 0.3:
            other = ("rows", tuple(row[::-1] for row in one[1]))
        return replace(base, assignment=one), replace(base, assignment=other)

    def _position(self) -> Pair:
        base = replace(self._base(), independent=False, assignment=())
        number = self._rng.choice((ORDINAL, PROCESS))
        return base.with_field(BUILD, number, ("int", 0)), base.with_field(BUILD, number, ("int", 1))

    # ---- program and target ------------------------------------------------------------------------------------------

    def _program(self) -> Pair:
        one, other = self._rng.sample(self._maker.programs, 2)
        base = self._base()
        return replace(base, program=one), replace(base, program=other)

    def _executable_format(self) -> Pair:
        base = self._base()
        return replace(base, executable_format="pjrt"), replace(base, executable_format="pjrt-ifrt")

    def _target_part(self) -> Pair:
        base = self._base()
        parts = dict(base.parts)
        name = self._rng.choice(sorted(parts))
        parts[name] += self._rng.choice(("x", " ", ".1", "0"))
        return base, replace(base, parts=tuple(sorted(parts.items())))

    def _target_part_added(self) -> Pair:
        base = self._base()
        return base, replace(base, parts=tuple(sorted((*base.parts, ("slice_size", self._rng.choice(("", "1")))))))

    # ---- flags -------------------------------------------------------------------------------------------------------

    def _flags(self, road: str, *ways: list[tuple[str, Value | None]], ordered: bool = False) -> Pair:
        """One request with two ways to fill a road."""
        base = self._base()
        one, other = (normal(FlagsMeaning(tuple(way), ordered), self._maker.table) for way in ways)
        return base.with_flags(road, one), base.with_flags(road, other)

    def _some(self, road: str, count: int) -> list[tuple[str, Value | None]]:
        """So many different flags with their values."""
        names: dict[str, Value | None] = {}
        while len(names) < count:
            name = self._maker.flag_name()
            names[name] = self._maker.flag_value(name, road)
        return list(names.items())

    def _flag_value(self) -> Pair:
        road, name = self._rng.choice(ROADS), self._maker.flag_name()
        value = self._maker.flag_value(name, road)
        other = self._different(lambda: self._maker.flag_value(name, road), value)
        more = self._some(road, self._rng.randint(0, 2))
        return self._flags(road, [(name, value), *more], [(name, other), *more])

    def _flag_added(self) -> Pair:
        road = self._rng.choice(ROADS)
        flags = self._some(road, self._rng.randint(1, 3))
        return self._flags(road, flags, flags[1:])

    def _flag_name(self) -> Pair:
        road = self._rng.choice(ROADS)
        (one, value), (other, _) = self._some(road, 2)
        return self._flags(road, [(one, value)], [(other, value)])

    def _flag_road(self) -> Pair:
        one, other = self._rng.sample(ROADS, 2)
        flags = FlagsMeaning((("xla_made_up", ("text", "1")),))
        base = self._base().with_flags(one, FlagsMeaning()).with_flags(other, FlagsMeaning())
        return base.with_flags(one, flags), base.with_flags(other, flags)

    def _flag_list_order(self) -> Pair:
        """A flag of words that stands twice: it may add to what it had."""
        road, name = self._rng.choice(ROADS), self._maker.flag_name()
        one, other = ("text", "b"), ("text", self._rng.choice(("a", "1", "true")))
        ways = [[one, other], [other, one], [one], [other], [("text", "b,a")], [one, one]]
        first, second = self._rng.sample(ways, 2)
        return self._flags(road, [(name, value) for value in first], [(name, value) for value in second])

    def _flag_order_beside_one_that_sets_others(self) -> Pair:
        road = self._rng.choice(ROADS)
        flags = [*self._some(road, 2), (self._rng.choice(self._maker.table.ordered_flags), ("text", "true"))]
        return self._flags(road, flags, self._rng.sample(flags, 3), ordered=True)

    def _word_order(self) -> Pair:
        road = self._rng.choice(("LIBTPU_INIT_ARGS", "argv"))
        (one, _), (other, value) = self._some(road, 2)
        words: list[tuple[str, Value | None]] = [(one, None), ("=", ("text", "0")), (other, value)]
        ways = [words, [words[2], *words[:2]], [words[0], words[2]], [(one, ("text", "0")), words[2]]]
        first, second = self._rng.sample(ways, 2)
        return self._flags(road, first, second, ordered=True)

    def _words_behind_flags(self) -> Pair:
        """What XLA reads no further than, and what stands behind it."""
        road, base = self._rng.choice(XLA_ROADS), self._base()
        flags = (("xla_made_up", ("text", "1")),)
        one, other = self._rng.sample(("", "stop", "stop --xla_b=1", "stop --xla_b=2", "x"), 2)
        return (
            base.with_flags(road, FlagsMeaning(flags, rest=one)),
            base.with_flags(road, FlagsMeaning(flags, rest=other)),
        )

    def _negation(self) -> Pair:
        """`--nof` is another way to set `f`: together, their order counts."""
        road = self._rng.choice(ROADS)
        on: tuple[str, Value | None] = ("xla_made_up", ("text", "true"))
        off: tuple[str, Value | None] = ("noxla_made_up", ("text", "true"))
        first, second = self._rng.sample([[on, off], [off, on], [on], [off], [on, off, on]], 2)
        return self._flags(road, first, second, ordered=True)

    # ---- files -------------------------------------------------------------------------------------------------------

    def _known_file(self) -> Pair:
        road = self._rng.choice(ROADS)
        one, other = self._rng.sample(range(len(CONTENTS)), 2)
        return self._flags(road, [(_KNOWN_FILE, ("content", one))], [(_KNOWN_FILE, ("content", other))])

    def _folder(self) -> Pair:
        road = self._rng.choice(ROADS)
        one, other = self._rng.sample(range(len(FOLDERS)), 2)
        return self._flags(road, [(_FOLDER_FLAG, ("folder", one))], [(_FOLDER_FLAG, ("folder", other))])

    def _unknown_file(self) -> Pair:
        """The same path, and another content by the time that the second key is made."""
        one, other = self._rng.sample(range(len(CONTENTS)), 2)
        return self._paths(("path", self._maker.slot(), one), None, other)

    def _unknown_path(self) -> Pair:
        number = self._rng.randrange(len(CONTENTS))
        return self._paths(("path", self._maker.slot(), number), self._maker.slot(), number)

    def _paths(self, one: Value, slot: int | None, number: int) -> Pair:
        other: Value = ("path", one[1] if slot is None else slot, number)
        road, base = self._rng.choice((*ROADS, "variable", "option")), self._base()
        if road == "variable":
            return base.with_item("variables", "TPU_TABLE", one), base.with_item("variables", "TPU_TABLE", other)
        if road == "option":
            return base.with_field(DEBUG, 333, one), base.with_field(DEBUG, 333, other)
        return self._flags(road, [("xla_made_up", one)], [("xla_made_up", other)])

    # ---- variables, plugin options, extras ---------------------------------------------------------------------------

    def _variable(self) -> Pair:
        base, name = self._base(), self._maker.variable()
        value = self._maker.text("")
        other = self._different(lambda: self._maker.text(""), value)
        return base.with_item("variables", name, value), base.with_item("variables", name, other)

    def _variable_added(self) -> Pair:
        base, name = self._base(), self._maker.variable()
        return base.with_item("variables", name, self._maker.text("")), base.with_item("variables", name, None)

    def _plugin_option(self) -> Pair:
        return self._python_value("plugin")

    def _extra(self) -> Pair:
        return self._python_value("extras")

    def _python_value(self, group: str) -> Pair:
        base, value = self._base(), self._maker.python_value()
        other = self._different(self._maker.python_value, value)
        return base.with_item(group, "a", value), base.with_item(group, "a", other)

    def _plugin_option_added(self) -> Pair:
        base, group = self._base(), self._rng.choice(("plugin", "extras"))
        return base.with_item(group, "a", self._maker.python_value()), base.with_item(group, "a", None)

    # ---- what only looks alike ---------------------------------------------------------------------------------------

    def _value_that_poses_as_a_file(self) -> Pair:
        """The text that stands in a key for a file, given as a value."""
        road = self._rng.choice(XLA_ROADS)
        number = self._rng.randrange(len(CONTENTS))
        read = f"content:sha256:{hashlib.sha256(CONTENTS[number]).hexdigest()}"
        poses: list[Value] = [("text", read), ("text", f"{read} literal"), ("text", f"{read} literal literal")]
        ways: list[list[tuple[str, Value | None]]] = [[(_KNOWN_FILE, value)] for value in (("content", number), *poses)]
        one, other = self._rng.sample(ways, 2)
        return self._flags(road, one, other)

    def _file_that_poses_as_a_folder(self) -> Pair:
        """A file that holds what a folder's listing would."""
        number = self._rng.randrange(len(FOLDERS))
        road = self._rng.choice(ROADS)
        return self._flags(road, [(_FOLDER_FLAG, ("folder", number))], [(_FOLDER_FLAG, ("listing", number))])

    def _flag_that_poses_as_a_group(self) -> Pair:
        road = self._rng.choice(XLA_ROADS)
        names = ["*rest*", "**rest*", "*ordered*", "*all*", "rest*", "=", "*word*"]
        one, other = self._rng.sample([f"x{name}" if name == "=" else name for name in names], 2)
        base, stop = self._base(), ("xla_a", ("text", "1"))
        posing = base.with_flags(road, normal(FlagsMeaning((stop, (one, ("text", "stop")))), self._maker.table))
        if self._rng.random() < 0.5:
            return posing, base.with_flags(road, FlagsMeaning((stop,), rest="stop"))
        return posing, base.with_flags(road, normal(FlagsMeaning((stop, (other, ("text", "stop")))), self._maker.table))

    def _word_that_poses_as_a_flag(self) -> Pair:
        word: tuple[str, Value | None] = ("=", ("text", "1"))
        poses: list[tuple[str, Value | None]] = [("*word*", ("text", "1")), ("", ("text", "1")), ("", ("text", "=1"))]
        bare: tuple[str, Value | None] = ("xla_a", None)
        one, other = self._rng.sample([[bare, item] for item in (word, *poses)], 2)
        return self._flags("LIBTPU_INIT_ARGS", one, other, ordered=True)

    def _end_of_flags(self) -> Pair:
        """Behind `--` a reader takes no flag, if it heeds it."""
        flag: tuple[str, Value | None] = ("xla_a", ("text", self._rng.choice(("0", "1"))))
        end: tuple[str, Value | None] = ("", None)
        return self._flags(self._rng.choice(("LIBTPU_INIT_ARGS", "argv")), [end, flag], [flag], ordered=True)

    def _option_that_poses_as_a_flag(self) -> Pair:
        """An entry of a map that is no map of flags, under the name of a flag that is left out elsewhere."""
        base, name = self._base(), self._rng.choice(self._maker.table.dropped_flags)
        entries = (("a", ("text", "1")), (name, ("text", self._rng.choice("12"))))
        return (
            base.with_field(DEBUG, _ESTIMATOR, ("map", tuple(sorted(entries)))),
            base.with_field(DEBUG, _ESTIMATOR, ("map", entries[:1])),
        )


def _overridden(base: Meaning, flag: str, value: Value | None) -> Meaning:
    overrides = dict(base.overrides)
    overrides.pop(flag, None)
    if value is not None:
        overrides[flag] = value
    return replace(base, overrides=tuple(sorted(overrides.items())))


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ")
