"""What of a process's surroundings changes the code that XLA makes, taken once, before the compiler initialises.

Roads: XLA_FLAGS and TF_XLA_FLAGS (or the file that each names), LIBTPU_INIT_ARGS, compiler flags on the command line,
further variables by prefix, plugin create options, framework extras. rules.py says what is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from torchtpu_cache_core.canonical.files import Noted, file_value, read_flag_file
from torchtpu_cache_core.canonical.flags import Flags, parse_argv, parse_init_args, parse_xla_flags
from torchtpu_cache_core.canonical.rules import (
    DROPPED_PLUGIN_OPTIONS,
    DROPPED_VARIABLES,
    KEPT_PREFIXES,
    KEPT_VARIABLES,
    TABLE_VERSION,
)
from torchtpu_cache_core.canonical.values import canonical_value
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.identity import Signature
from torchtpu_cache_core.key import Component

_XLA_ROADS: Final = ("XLA_FLAGS", "TF_XLA_FLAGS")
_INIT_ARGS_ROAD: Final = "LIBTPU_INIT_ARGS"
_ARGV_ROAD: Final = "argv"
_PLUGIN_ROAD: Final = "plugin"
_EXTRA_ROAD: Final = "extra"
_GIVEN_ROADS: Final = (f"{_PLUGIN_ROAD}.", f"{_EXTRA_ROAD}.")

_MAX_SHOWN: Final = 128  # of seven groups, beside options and target, in a key of 1,024 components
_VARIABLE: Final = re.compile(r"[A-Za-z0-9_]{1,200}")  # no dot, which stands between a road and its flag
_FLAG: Final = re.compile(r"[!-~]{1,200}")
# The kernel refuses a longer single variable in a child's environment (MAX_ARG_STRLEN).
_MAX_VARIABLE_BYTES: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Flags and variables that change the code, as they stood at one moment. Built by `snapshot`.

    Args:
        variables: sorted (name, value) pairs of the variables that reach the compiler, to be set in a process that
            compiles. A flag variable that named a file holds the file's content, so that a later change of the file
            changes nothing.
        roads: flags by road, in the order in which the later one wins.
        parts: sorted (name, canonical value) pairs of which each is a component `env.<name>`.
        taken: the same variables as they were given, for `check_unchanged`.
        argv: the command line as it was given, for `check_files`.
        files: paths that were read, with what `stat` said of each then, for `check_files`.
        unidentified: why these surroundings have no components, as reason and detail of a Bypass; else empty.
    """

    variables: tuple[tuple[str, str], ...]
    roads: tuple[tuple[str, Flags], ...]
    parts: tuple[tuple[str, str], ...]
    taken: tuple[tuple[str, str], ...]
    argv: tuple[str, ...] = ()
    files: tuple[tuple[str, Signature], ...] = field(default=(), compare=False, repr=False)
    unidentified: tuple[str, ...] = ()

    @classmethod
    def without_identity(cls, environ: Mapping[str, str], bypass: Bypass) -> Self:
        """Surroundings that `snapshot` refused: they can be compiled in, and nothing may be cached."""
        taken = _relevant(environ)
        return cls(variables=taken, roads=(), parts=(), taken=taken, unidentified=(bypass.reason, bypass.detail))

    @classmethod
    def snapshot(
        cls,
        environ: Mapping[str, str],
        argv: Sequence[str],
        *,
        plugin_options: Mapping[str, object] = {},
        extras: Mapping[str, object] = {},
    ) -> Self:
        """Takes the surroundings of a compile; files that flags name are read now.

        Args:
            environ: variables of the process that compiles.
            argv: its command line.
            plugin_options: what the plugin's client was created with; values as `canonical_value` takes them.
            extras: what a framework knows to change the code beside all that; likewise.

        Raises:
            Bypass: a file that a flag names cannot be read, or flags come by a road that is not looked at.
            InvalidRequest: an option or extra is no plain value.
        """
        taken = _relevant(environ)
        noted: Noted = {}
        variables, roads, parts = _read(taken, argv, noted=noted)
        kept = {n: canonical_value(v) for n, v in plugin_options.items() if n not in DROPPED_PLUGIN_OPTIONS}
        parts |= _road_parts(_PLUGIN_ROAD, kept)
        parts |= _road_parts(_EXTRA_ROAD, {name: canonical_value(value) for name, value in extras.items()})
        return cls(
            variables=tuple(sorted(variables.items())),
            roads=tuple(roads),
            parts=tuple(sorted(parts.items())),
            taken=taken,
            argv=tuple(argv),
            files=tuple(sorted(noted.items())),
        )

    def components(self) -> list[Component]:
        """The components `env.*`, sorted by name.

        Raises:
            Bypass: there are none (`without_identity`).
        """
        if self.unidentified:
            raise Bypass(*self.unidentified)
        # A value from the system may hold bytes that are no UTF-8.
        shown = [Component.of(f"env.{n}", value.encode("utf-8", "surrogateescape")) for n, value in self.parts]
        return [Component.of("env.table", TABLE_VERSION), *shown]

    def flag(self, name: str) -> str | None:
        """The value that a compiler flag has by any road, `true` for one without a value; None where it is not given.

        Where roads disagree: the command line before LIBTPU_INIT_ARGS before TF_XLA_FLAGS before XLA_FLAGS.
        """
        values = [value for _, flags in self.roads if (value := flags.effective(name)) is not None]
        return values[-1] if values else None

    def check_unchanged(self, environ: Mapping[str, str]) -> None:
        """Refuses a key for surroundings that are not those of the snapshot.

        Raises:
            Bypass: a variable of the key was set, changed or removed since.
        """
        now, then = dict(_relevant(environ)), dict(self.taken)
        changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
        if changed:
            raise Bypass("environment_changed", f"{', '.join(changed)} changed after the compiler was set up")

    def check_files(self) -> None:
        """Refuses what was compiled while the files that variables and flags name were changed: nobody can tell which
        content the compiler saw.

        Raises:
            Bypass: a file was written or replaced since the snapshot, even by the same content, or is not readable.
        """
        if not self.taken and not any(word.startswith("-") for word in self.argv):
            return  # nothing was given that could name a file
        now = Environment.snapshot(dict(self.taken), self.argv)
        parts = tuple(part for part in self.parts if not part[0].startswith(_GIVEN_ROADS))
        if (now.parts, now.files) != (parts, self.files):
            raise Bypass("environment_changed", "a file that a flag names changed during the compile")


def _relevant(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted(
            (name, value)
            for name, value in environ.items()
            if (name.startswith(KEPT_PREFIXES) or name in KEPT_VARIABLES) and name not in DROPPED_VARIABLES
        )
    )


def _read(
    taken: Iterable[tuple[str, str]], argv: Sequence[str], *, noted: Noted
) -> tuple[dict[str, str], list[tuple[str, Flags]], dict[str, str]]:
    """The variables with the content of flag files, flags by road, and the parts that both come to."""
    variables = dict(taken)
    plain = {n: v for n, v in variables.items() if n not in (*_XLA_ROADS, _INIT_ARGS_ROAD)}
    roads: list[tuple[str, Flags]] = []
    for road in _XLA_ROADS:
        if variables.get(road):
            text = _flag_text(road, variables[road], noted=noted)
            roads.append((road, parse_xla_flags(text)))
            variables[road] = _inline(variables[road], text)
    if variables.get(_INIT_ARGS_ROAD):
        roads.append((_INIT_ARGS_ROAD, parse_init_args(variables[_INIT_ARGS_ROAD], noted=noted)))
    given = parse_argv(argv, noted=noted)
    if given.flags or given.rest:
        roads.append((_ARGV_ROAD, given))
    parts: dict[str, str] = {}
    for road, flags in roads:
        parts |= _road_parts(road, flags.canonical(noted=noted))
    named = {name: file_value(name, value, noted=noted) for name, value in plain.items()}
    parts |= _shown("variables", named, _VARIABLE)
    return variables, roads, parts


def _flag_text(road: str, value: str, noted: Noted) -> str:
    stripped = value.strip(" \t\r\n")
    if not stripped or stripped.startswith("-"):
        return value
    return read_flag_file(road, value, noted=noted).decode("utf-8", "surrogateescape")


def _inline(value: str, text: str) -> str:
    if text is value or len(os.fsencode(text)) > _MAX_VARIABLE_BYTES or "\0" in text:
        return value
    # A text that does not begin with a flag would be taken for a file's name; as a file's content it holds no flags.
    return text if text.lstrip(" \t\r\n").startswith("-") else ""


def _road_parts(road: str, values: Mapping[str, str]) -> dict[str, str]:
    return _shown(road, {f"{road}.{name}": value for name, value in values.items()}, _FLAG)


def _shown(group: str, values: Mapping[str, str], suited: re.Pattern[str]) -> dict[str, str]:
    """One part for each value, or one for the whole group where names or their number do not suit a component."""
    if all(suited.fullmatch(name) for name in values) and len(values) <= _MAX_SHOWN:
        return dict(values)
    return {f"{group}.*all*": _framed(item for pair in sorted(values.items()) for item in pair)}


def _framed(items: Iterable[str]) -> str:
    return "".join(f"{len(item)}:{item}" for item in items)
