"""Runs the modules of tests/drills or tests/bench: a JSON line per figure on stdout, progress on stderr.

    python -m support.campaign drills [--only NAME ...] [--short] [--out FILE]

NAME is a module of the package (`kill`). Exit code 1 where a figure falls short or a module failed, 2 where there is no
such module.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from support.figures import Campaign, Figure, Size

TESTS = Path(__file__).parents[1]


def names(package: str) -> list[str]:
    """The modules of a package that have figures, in the order they run."""
    return sorted(
        path.stem
        for path in (TESTS / package).glob("*.py")
        if not path.stem.startswith(("test_", "_")) and "\ndef run(" in path.read_text()
    )


def campaign(package: str, name: str) -> Campaign:
    """The `run` of one module."""
    return cast("Campaign", importlib.import_module(f"{package}.{name}").run)


def figures(package: str, name: str, size: Size) -> Iterator[Figure]:
    """The figures of one module; one that says so, and is not ok, where it fails or has none."""
    count = 0
    try:
        for figure in campaign(package, name)(size):
            count += 1
            yield figure
    except Exception as error:
        traceback.print_exc()
        yield Figure(name, float("nan"), "", "it runs", False, {"error": f"{type(error).__name__}: {error}"[:500]})
    else:
        if not count:
            yield Figure(name, 0, "figures", ">= 1", False)


def main(arguments: list[str] | None = None) -> int:
    """The command line; gives its exit code."""
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("package", choices=("drills", "bench"))
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--short", action="store_true", help="the short form, as in `make test`")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    parsed = parser.parse_args(arguments)
    chosen = names(parsed.package)
    unknown = sorted(set(parsed.only) - set(chosen))
    if unknown:
        print(f"no figures are called {unknown[0]!r}; there are: {', '.join(chosen)}", file=sys.stderr)
        return 2
    chosen = [name for name in chosen if name in parsed.only or not parsed.only]
    size = Size.SHORT if parsed.short else Size.FULL
    short: list[str] = []
    for number, name in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {name} ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        for figure in figures(parsed.package, name, size):
            line = figure.to_json()
            print(line, flush=True)
            if parsed.out is not None:
                with parsed.out.open("a") as out:
                    out.write(line + "\n")
            if not figure.ok:
                short.append(figure.name)
        print(f"[{number}/{len(chosen)}] {name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if short:
        print(f"short of their bars: {', '.join(short)}", file=sys.stderr)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
