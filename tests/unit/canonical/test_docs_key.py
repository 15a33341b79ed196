"""docs/key.md says what the code does. `python tests/unit/canonical/test_docs_key.py` writes its tables anew."""

from __future__ import annotations

import re
from pathlib import Path

import torchtpu_cache_core
from torchtpu_cache_core.canonical.allowlist import ALLOWED, ALLOWLIST_VERSION
from torchtpu_cache_core.canonical.forms import FORM_PORTABLE, FORM_TEXT, FORM_VERSION, PAYLOAD_SUFFIX
from torchtpu_cache_core.canonical.options import BUILD_OPTIONS, COMPILE_OPTIONS, Row
from torchtpu_cache_core.canonical.rules import (
    DROPPED_FLAGS,
    DROPPED_PLUGIN_OPTIONS,
    DROPPED_VARIABLES,
    FILE_FLAGS,
    KEPT_PREFIXES,
    KEPT_VARIABLES,
    ORDERED_FLAGS,
    TABLE_VERSION,
)
from torchtpu_cache_core.canonical.scan import FORM_RAW
from torchtpu_cache_core.key import SCHEME

PAGE = Path(__file__).resolve().parents[3] / "docs" / "key.md"

REASONS = {
    "custom_call_unlisted": "a custom call is not on the allow-list",
    "environment_changed": "a variable of the key changed after the snapshot",
    "flag_file_unreadable": "a file that a flag names cannot be read",
    "flags_unreadable": "flags come by a road that is not looked at (`--fromenv`)",
    "host_callback": "the program calls back into Python",
    "program_too_large": "the program has more than 1 GiB",
    "target_unknown": "platform, version, compiler identity or CPU cannot be found",
    "unparsed_custom_call": "the program cannot be parsed here and holds a trace of a custom call",
    "unscannable": "the program is neither MLIR bytecode of a known version nor MLIR text",
}


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.split("|")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def reasons_of(dropped: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name in sorted(dropped):
        by_reason.setdefault(dropped[name], []).append(f"`{name}`")
    return table(
        "left out|because it says", [(", ".join(names), reason) for reason, names in sorted(by_reason.items())]
    )


def listed(names: frozenset[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def option_rows(table_name: str, rows: dict[int, Row]) -> list[tuple[str, ...]]:
    return [(table_name, str(number), f"`{name}`", rule, why) for number, (name, _, rule, why) in rows.items()]


def tables() -> dict[str, str]:
    allowed: dict[str, list[str]] = {}
    for name, why in ALLOWED.items():
        allowed.setdefault(why, []).append(f"`{name}`")
    options = option_rows("compile", COMPILE_OPTIONS) + option_rows("build", BUILD_OPTIONS)
    return {
        "allowed": table("targets|why", [(", ".join(names), why) for why, names in allowed.items()]),
        "compile options": table("message|field|name|rule|why", options),
        "flags": reasons_of(DROPPED_FLAGS),
        "variables": reasons_of(DROPPED_VARIABLES),
        "plugin options": reasons_of(DROPPED_PLUGIN_OPTIONS),
        "bypass reasons": table("reason|when", [(f"`{reason}`", when) for reason, when in sorted(REASONS.items())]),
        "ordered flags": listed(ORDERED_FLAGS),
        "file flags": listed(FILE_FLAGS),
        "prefixes": f"{listed(KEPT_PREFIXES)} and {listed(KEPT_VARIABLES)}",
        "versions": f"tables {TABLE_VERSION}, allow-list {ALLOWLIST_VERSION}, forms {FORM_VERSION}",
    }


def written(page: str) -> str:
    for name, text in tables().items():
        head, start, rest = page.partition(f"<!-- {name} -->")
        _, end, tail = rest.partition("<!-- end -->")
        assert start and end, f"docs/key.md has no place for {name}"
        page = f"{head}{start}\n{text}\n{end}{tail}" if text.startswith("|") else f"{head}{start}{text}{end}{tail}"
    return page


def test_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "run this file as a script to write the tables anew"


def test_the_page_names_scheme_and_forms() -> None:
    page = PAGE.read_text()
    for name in (SCHEME, FORM_PORTABLE, FORM_TEXT, FORM_RAW, f"...{PAYLOAD_SUFFIX}"):
        assert f"`{name}`" in page


def test_every_reason_is_on_the_page() -> None:
    core = Path(torchtpu_cache_core.__file__).parent
    raised = set()
    for path in core.rglob("*.py"):
        raised |= set(re.findall(r'Bypass\(\s*"([a-z_]+)"', path.read_text()))
    assert raised == set(REASONS)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
