"""Runs the modules of tests/drills or tests/bench: a JSON line per figure on stdout, progress on stderr.

    python -m support.campaign drills [--only NAME ...] [--short] [--out FILE]

NAME is a module of the package (`kill`). A module that runs to its end gets one more figure, `NAME.seconds`. Each line
also says under what it was measured: `size`, `load` (the machine's load average over the last minute), `cpus` and
`commit`, with a plus sign where files of the repository were changed. Exit code 1 where a figure falls short or a
module failed, 2 where there is no such module.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from support.figures import Campaign, Figure, Size

TESTS = Path(__file__).parents[1]


def names(package: str) -> list[str]:
    """The modules of a package that have figures, in the order they run."""
    return sorted(
        path.stem
        for path in (TESTS / package).glob("*.py")
        if not path.stem.startswith(("test_", "_")) and "\ndef run(" in path.read_text()
    )


def figures(package: str, name: str, size: Size) -> Iterator[Figure]:
    """The figures of one module; one with an `error`, which is not ok, where it fails or has none."""
    count, module = 0, None
    try:
        module = importlib.import_module(f"{package}.{name}")
        for figure in cast("Campaign", module.run)(size):
            count += 1
            yield figure
    except Exception as error:
        traceback.print_exc()
        yield _failed(name, f"{type(error).__name__}: {error}"[:500], **_seed(module, error))
    else:
        if not count:
            yield _failed(name, "it gave no figures")


def _failed(name: str, error: str, **more: Any) -> Figure:
    return Figure(name, float("nan"), "", "it runs", False, {"error": error, **more})


def _seed(module: ModuleType | None, error: Exception) -> dict[str, int]:
    """The seed of what failed: that of `figures.seeded`, else the module's constant SEED."""
    seed = getattr(error, "seed", getattr(module, "SEED", None))
    return {} if seed is None else {"seed": seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporter:
    """Prints figures as lines, with what a reader needs to compare or repeat them.

    Args:
        commit: of the code that runs; a working tree may move on while it does.
        out: a file that gets the lines too.
    """

    size: Size
    commit: str | None
    out: Path | None

    def report(self, figure: Figure) -> None:
        """To be called as soon as the figure is known: the load is that of now."""
        load, cpus = round(os.getloadavg()[0], 2), len(os.sched_getaffinity(0))
        line = figure.to_json(size=self.size.value, load=load, cpus=cpus, cpu=_CPU, commit=self.commit)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(line + "\n")


def _cpu() -> str:
    """What the kernel calls the processor; machines that are called the same may have others."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


_CPU = _cpu()


def _commit() -> str | None:
    """The commit that the working tree is at; None where that cannot be known."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(TESTS), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


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
    reporter = Reporter(size=size, commit=_commit(), out=parsed.out)
    not_ok: list[str] = []
    for number, name in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {name} ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        ended = True
        for figure in figures(parsed.package, name, size):
            reporter.report(figure)
            ended = ended and "error" not in figure.more
            if not figure.ok:
                not_ok.append(figure.name)
        seconds = time.monotonic() - started
        if ended:
            reporter.report(Figure.told(f"{name}.seconds", seconds, "s"))
        print(f"[{number}/{len(chosen)}] {name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    if not_ok:
        print(f"not ok: {', '.join(not_ok)}", file=sys.stderr)
    return 1 if not_ok else 0


if __name__ == "__main__":
    sys.exit(main())
