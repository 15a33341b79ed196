"""What every command prints: answers on standard output, everything about the work on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_PARTLY: Final = 3

_UNFOLDED_COLUMNS: Final = 100_000

JSON_SCHEMA: Final = 1
"""Goes up when a field of any `--json` answer changes its meaning or goes away."""


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on one line, flushed, so that a reader sees each as it comes."""
    print(json.dumps({"schema": JSON_SCHEMA, **value}), flush=True)


def note(message: str) -> None:
    """A line about the work, above the progress line where there is one. Nobody may be there to read it."""
    with contextlib.suppress(BrokenPipeError):
        print(message, file=sys.stderr, flush=True)


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Ends the command with one sentence."""
    note(f"error: {message}")
    raise typer.Exit(code)


def console(*, stderr: bool = False) -> Console:
    """A terminal as wide as it is; a pipe or a file gets its lines whole, whatever COLUMNS says of a terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream is not None and stream.isatty() else _UNFOLDED_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> None:
    """A plain table; `right` names the columns that are numbers. Cells are text, never markup.

    Where the terminal is narrow, texts are folded between words, the widest first. A word (a key, a path) and a number
    stay whole, so that they can be copied, even where the terminal then breaks the line. No line ends in blanks.
    """
    from rich.box import SIMPLE_HEAD
    from rich.cells import cell_len
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    narrowest = len(columns) - 1
    for index, column in enumerate(columns):
        parts = [part for cell in (column, *(row[index] for row in rows)) for part in cell.splitlines()]
        if index in right:
            width = max(map(cell_len, parts), default=0)
            table.add_column(Text(column), justify="right", no_wrap=True, min_width=width)
        else:
            width = max((cell_len(word) for part in parts for word in part.split()), default=0)
            table.add_column(Text(column), overflow="fold", min_width=width)
        narrowest += width
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    screen = console()
    options = screen.options.update(width=max(screen.width, narrowest))
    line_character = "-" if options.ascii_only else "─"
    options.encoding = "utf-8"  # else Rich would draw another box, with borders
    lines = []
    for segments in Segment.split_lines(screen.render(table, options)):
        line = Text.assemble(*((segment.text, segment.style or "") for segment in segments))
        line.rstrip()
        lines.append(line)
    rule = next(index for index, line in enumerate(lines) if set(line.plain) == {"─"})
    widest = max(line.cell_len for index, line in enumerate(lines) if index != rule)
    lines[rule] = Text(line_character * widest)
    screen.print(Text("\n").join(lines), soft_wrap=True)


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """`1 entry`, `2,000 entries`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def human_limit(size: int | None) -> str:
    """A limit as people write it in the settings: `20 GiB` or `50 GB` where that is exact, else as `human_bytes`."""
    for base, units in ((1024, ("TiB", "GiB", "MiB")), (1000, ("TB", "GB", "MB"))):
        for power, unit in zip((4, 3, 2), units, strict=True):
            if size and size % base**power == 0:
                return f"{size // base**power} {unit}"
    return human_bytes(size)


def human_bytes(size: int | None) -> str:
    """`1.5 MB`: powers of ten, three figures."""
    if size is None:
        return "-"
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def human_seconds(seconds: float | None) -> str:
    """`3.2 ms`, `1.25 s`, `2m05s`: three figures."""
    if seconds is None:
        return "-"
    sign, seconds = ("-", -seconds) if seconds < 0 else ("", seconds)
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{sign}{milliseconds:.{0 if milliseconds >= 99.95 else 1}f} ms"
    if seconds < 59.95:
        return f"{sign}{seconds:.{1 if seconds >= 9.995 else 2}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{sign}{minutes}m{rest:02d}s"
