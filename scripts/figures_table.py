"""Turns the JSON lines of drills and benchmarks into Markdown tables.

    python scripts/figures_table.py .bench/bench.jsonl                          # prints one table
    python scripts/figures_table.py .bench/bench.jsonl --into docs/benchmarks.md

With `--into`, each place between `<!-- figures of NAME -->` and `<!-- end -->` gets the figures whose name begins with
NAME, and stays as it is where the lines have none of them. Of lines with one name the last counts; that a module failed
counts until a later run of it comes to its end. Exit code 1 where a module of the lines failed or has no place.
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
_MOST_OF_A_TEXT = 100
_MOST_PARTS = 5
_SHOWN_OTHERWISE = ("name", "value", "unit", "bar", "ok", "error", "size", "load", "cpus", "cpu", "commit")
_UNITS = {"ms": "ms", "seconds": "s", "mb": "MB", "bytes": "bytes"}

Line = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="JSON lines, as --out of the campaign writes them")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT", help="a document with places for tables")
    parsed = parser.parse_args()
    lines = read_lines(parsed.lines.read_text())
    failed = [name for name, line in lines.items() if "error" in line]
    for name in failed:
        print(f"{name} failed: {lines[name]['error']}", file=sys.stderr)
    if parsed.into is None:
        print(table(list(lines.values())), end="")
        return 1 if failed else 0
    before = parsed.into.read_text()
    text, homeless = filled(before, lines)
    parsed.into.write_text(text)
    print(f"{parsed.into}: {len(lines)} figures, {'unchanged' if text == before else 'changed'}")
    for name in homeless:
        print(f"{parsed.into} has no place for the figures of {name}", file=sys.stderr)
    return 1 if homeless or failed else 0


def read_lines(text: str) -> dict[str, Line]:
    """The figures by name, in the order in which they first came."""
    lines: dict[str, Line] = {}
    for raw in text.splitlines():
        line = json.loads(raw)
        lines[line["name"]] = line
        module, _, rest = line["name"].partition(".")
        if rest == "seconds" and "error" in lines.get(module, {}):
            del lines[module]  # it failed earlier, and has come to its end now
    return lines


def filled(document: str, lines: dict[str, Line]) -> tuple[str, list[str]]:
    """The document with its tables, and the modules whose figures have no place in it."""
    modules: dict[str, list[Line]] = {}
    for name, line in lines.items():
        modules.setdefault(name.partition(".")[0], []).append(line)
    places = {match[2] for match in _PLACE.finditer(document)}

    def replaced(match: re.Match[str]) -> str:
        found = modules.get(match[2])
        return match[0] if found is None else f"{match[1]}{table(found)}{_took(found)}{match[3]}"

    return _PLACE.sub(replaced, document), [name for name in modules if name not in places]


def table(lines: list[Line]) -> str:
    """What the figures are; how long a module took is none of them."""
    return _HEAD + "".join(f"| {' | '.join(_cells(line))} |\n" for line in lines if not _is_duration(line))


def _is_duration(line: Line) -> bool:
    return line["name"].partition(".")[2] == "seconds"


def _took(lines: list[Line]) -> str:
    """Below the table: how long its module takes, and on what it was measured, as far as the lines say."""
    parts = [f"About {_duration(line['value'])}" for line in lines if _is_duration(line)]
    loads = [line["load"] for line in lines if "load" in line]
    if loads:
        cpus = " or ".join(sorted({str(line["cpus"]) for line in lines if "cpus" in line}))
        models = " or ".join(sorted({str(line["cpu"]) for line in lines if line.get("cpu")}))
        parts.append(f"{cpus} CPUs{f' ({models})' if models else ''} at a load average of {_span(loads)}")
    commits = sorted({line["commit"] for line in lines if line.get("commit")})
    if commits:
        parts.append(f"commit {', '.join(f'`{commit}`' for commit in commits)}")
    if any(line.get("size") == "short" for line in lines):
        parts.append("in the short form, which means little")
    return f"\n{', '.join(parts)}.\n" if parts else ""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _cells(line: Line) -> list[str]:
    bar = line["bar"] or ""
    if "error" in line:
        value, verdict = f"failed: {_text(line['error'])}", "**failed**"
    else:
        value = "-" if line["value"] is None else f"{_number(line['value'])} {line['unit']}".strip()
        verdict = "" if not bar and line["ok"] else "holds" if line["ok"] else "**falls short**"
    cells = [f"`{line['name']}`", value, bar, verdict, _beside(line)]
    return [cell.replace("|", "\\|") for cell in cells]


def _beside(line: Line) -> str:
    """What explains a figure, as far as there is room for it."""
    shown, length = [], 0
    for key, value in line.items():
        text = "" if key in _SHOWN_OTHERWISE else _named(key, value)
        if not text:
            continue
        length += len(text) + 2
        if length > _MOST_CHARACTERS:
            shown.append("...")
            break
        shown.append(text)
    return ", ".join(shown)


def _named(key: str, value: Any) -> str:
    """`bare_ms: 40.1` as "bare 40.1 ms", `first: []` as nothing."""
    text = str(value) if key == "seed" else _shown(value)
    if key == "what":  # says what is counted
        return text
    stem, _, last = key.rpartition("_")
    if stem and last in _UNITS and not isinstance(value, str | dict):
        return text and f"{stem.replace('_', ' ')} {text} {_UNITS[last]}"
    return text and f"{key.replace('_', ' ')} {text}"


def _shown(value: Any) -> str:
    """A value for people: the least and the most of many numbers, the parts of a dictionary that are not zero."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        named = (_named(str(key), part) for key, part in value.items() if part and not isinstance(part, dict))
        parts = [part for part in named if part]
        listed = "; ".join(parts[:_MOST_PARTS] + ["..."] * (len(parts) > _MOST_PARTS))
        return f"({listed})" if listed else ""
    if isinstance(value, list) and value:
        return _span(value) if all(isinstance(part, int | float) for part in value) else _text(_shown(value[0]))
    return ""


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def _span(numbers: list[float]) -> str:
    least, most = _number(min(numbers)), _number(max(numbers))
    return least if least == most else f"{least}-{most}"


def _text(text: str) -> str:
    """One line, and not too long."""
    line = " ".join(text.split())
    return line if len(line) <= _MOST_OF_A_TEXT else line[: _MOST_OF_A_TEXT - 3] + "..."


if __name__ == "__main__":
    sys.exit(main())
