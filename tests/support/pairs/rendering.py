"""Requests from meanings, written in any of the ways that must not matter.

Flags are written by the rules of their readers, without a line of the code that reads them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from support.pairs.keytable import KeyTable
from support.pairs.meanings import PLAIN, ROADS, XLA_ROADS, FlagsMeaning, Meaning, Value
from support.pairs.noise import Noise, World, riffled
from support.pairs.optionswire import OptionsWriter

_ELSEWHERE: Final = ("HOME", "USER", "HOSTNAME", "MASTER_PORT", "RUN_ID", "PWD", "JAX_PLATFORMS_MADE_UP", "TFX_FLAGS")


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
            options=OptionsWriter(self._table, self._world, rng, noise).write(meaning),
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
            return riffled(list(groups.values()), rng)
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
