"""What matters to a key and what does not, as docs/key.md says it and XLA's own descriptors name it.

An oracle that asks nothing of the code that makes keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from support.descriptors import Message, messages_of
from torchtpu_cache_core.jaxlib_library import jaxlib_library

REPOSITORY: Final = Path(__file__).parents[3]
_PAGE: Final = REPOSITORY / "docs" / "key.md"
_NAME: Final = re.compile(r"`([^`]+)`")
_ROW: Final = re.compile(r"^\| (compile|build) \| (\d+) \| `(\w+)` \| ([a-z -]+?) \|", re.MULTILINE)

COMPILE, BUILD, DEBUG = "compile", "build", "debug"
_MESSAGES: Final = {COMPILE: "CompileOptionsProto", BUILD: "ExecutableBuildOptionsProto", DEBUG: "DebugOptions"}

KEEP, DROP, NORMALISE = "keep", "drop", "normalise where position-independent"


@dataclass(frozen=True, kw_only=True)
class KeyTable:
    """The page's tables.

    Args:
        fields: name and kind by level (`compile`, `build`, `debug`) and number, from the descriptors of every jaxlib
            that is here.
        rules: what becomes of a field of `compile` or `build`, by level and number.
        dropped_flags, dropped_variables, dropped_plugin_options: names that say nothing of the code.
        file_flags: flags that name an input.
        ordered_flags: beside one of these the order of all flags counts.
        releases: how many releases of jaxlib the fields come from.
    """

    fields: dict[str, Message]
    rules: dict[tuple[str, int], str]
    dropped_flags: tuple[str, ...]
    dropped_variables: tuple[str, ...]
    dropped_plugin_options: tuple[str, ...]
    file_flags: tuple[str, ...]
    ordered_flags: tuple[str, ...]
    releases: int

    def is_dropped(self, level: str, number: int) -> bool:
        """Whether a field never matters."""
        if level == DEBUG:
            return self.fields[DEBUG][number][0] in self.dropped_flags
        return self.rules[level, number] == DROP

    @cached_property
    def kept(self) -> dict[str, list[int]]:
        """By level, the fields that matter, positions among them."""
        return {
            level: [number for number in sorted(fields) if not self.is_dropped(level, number)]
            for level, fields in self.fields.items()
        }

    @cached_property
    def dropped_debug_options(self) -> list[int]:
        """Fields of DebugOptions that never matter."""
        return [number for number in sorted(self.fields[DEBUG]) if self.is_dropped(DEBUG, number)]

    @cached_property
    def booleans(self) -> frozenset[str]:
        """Flags of which `1` means `true`."""
        return frozenset(name for name, kind in self.fields[DEBUG].values() if kind == "bool")


@cache
def key_table() -> KeyTable:
    """The tables, read once."""
    page = _PAGE.read_text()

    def between(name: str) -> str:
        return page.partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0]

    def names(table: str) -> tuple[str, ...]:
        rows = [line.rpartition(" | ")[0] if line.startswith("|") else line for line in between(table).splitlines()]
        return tuple(sorted(name for row in rows for name in _NAME.findall(row)))

    libraries = [jaxlib_library(), *REPOSITORY.glob(".venv-other/lib/python3*/site-packages/jaxlib/libjax_common.so")]
    releases = [messages_of(library) for library in libraries if library is not None]
    fields = {
        level: {number: row for release in releases for number, row in release[message].items()}
        for level, message in _MESSAGES.items()
    }
    return KeyTable(
        fields=fields,
        rules={(level, int(number)): rule for level, number, _, rule in _ROW.findall(between("compile options"))},
        dropped_flags=names("flags"),
        dropped_variables=names("variables"),
        dropped_plugin_options=names("plugin options"),
        file_flags=names("file flags"),
        ordered_flags=names("ordered flags"),
        releases=len(releases),
    )
