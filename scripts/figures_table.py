"""Turns the JSON lines of drills and benchmarks into Markdown tables.

    python scripts/figures_table.py .bench/bench.jsonl                          # prints one table
    python scripts/figures_table.py .bench/bench.jsonl --into docs/benchmarks.md

With `--into`, each place between `<!-- figures of NAME -->` and `<!-- end -->` gets the figures whose name begins with
NAME, and stays as it is where the lines have none of them. Of lines with one name the last counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

_PLACE = re.compile(r"(?s)(<!-- figures of (\w+) -->\n).*?(<!-- end -->)")
_HEAD = "| figure | measured | bar | | with |\n|---|---|---|---|---|\n"
_MOST_CHARACTERS = 160

Line = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="JSON lines, as --out of the campaign writes them")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="a document with places for tables")
    parsed = parser.parse_args()
    lines = read_lines(parsed.lines.read_text())
    if parsed.into is None:
        print(table(list(lines.values())), end="")
        return 0
    text, homeless = filled(parsed.into.read_text(), lines)
    parsed.into.write_text(text)
    for name in homeless:
        print(f"{parsed.into} has no place for the figures of {name}", file=sys.stderr)
    return 1 if homeless else 0


def read_lines(text: str) -> dict[str, Line]:
    """The figures by name, in the order in which they first came."""
    lines: dict[str, Line] = {}
    for raw in text.splitlines():
        line = json.loads(raw)
        lines[line["name"]] = line
    return lines


def filled(document: str, lines: dict[str, Line]) -> tuple[str, list[str]]:
    """The document with its tables, and the modules whose figures have no place in it."""
    modules: dict[str, list[Line]] = {}
    for name, line in lines.items():
        modules.setdefault(name.partition(".")[0], []).append(line)
    places = {match[2] for match in _PLACE.finditer(document)}

    def replaced(match: re.Match[str]) -> str:
        found = modules.get(match[2])
        return match[0] if found is None else f"{match[1]}{table(found)}{match[3]}"

    return _PLACE.sub(replaced, document), [name for name in modules if name not in places]


def table(lines: list[Line]) -> str:
    return _HEAD + "".join(f"| {' | '.join(_cells(line))} |\n" for line in lines)


def _cells(line: Line) -> list[str]:
    value = "-" if line["value"] is None else f"{line['value']:,}"
    bar = line["bar"] or ""
    verdict = "" if not bar and line["ok"] else "holds" if line["ok"] else "**falls short**"
    beside = ", ".join(
        f"{key} {shown:,}" if isinstance(shown, int | float) else f"{key} {shown}"
        for key, shown in line.items()
        if key not in ("name", "value", "unit", "bar", "ok") and isinstance(shown, int | float | str)
    )
    if len(beside) > _MOST_CHARACTERS:
        beside = beside[: _MOST_CHARACTERS - 3] + "..."
    cells = [f"`{line['name']}`", f"{value} {line['unit']}".strip(), bar, verdict, beside]
    return [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]


if __name__ == "__main__":
    sys.exit(main())
