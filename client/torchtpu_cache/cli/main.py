"""The command line: `torchtpu-cache`, short `ttc`.

A command's module is imported when it runs, so that `--help` costs little more than the interpreter and Typer.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Final

import typer

from torchtpu_cache.cli.lazy import SETTINGS, group_of, registrars
from torchtpu_cache.cli.output import EXIT_FAILED, EXIT_USAGE, note
from torchtpu_cache_core.verbosity import say_more

_HERE: Final = "torchtpu_cache.cli"
COMMANDS: Final = (
    ("compile", f"{_HERE}.compile:compile_files", "Compile StableHLO modules, or get them from the cache."),
    ("demo", f"{_HERE}.demo:demo", "Compile on one machine, get everything from the cache on another."),
    ("status", f"{_HERE}.status:status", "Show mode, tiers, limits, and what waits for the remote."),
    ("doctor", f"{_HERE}.doctor:doctor", "Check folders, canonicaliser, compilers and remote."),
    ("cache", f"{_HERE}.cache:app", "Entries of this machine's disk tier, or of the remote."),
    ("dev", f"{_HERE}.dev:app", "Keys and their components."),
    ("config", f"{_HERE}.config:app", "Settings and their origins."),
)
"""Name, home and summary of each command of this package."""


def _say_more(wanted: bool) -> None:
    if wanted:
        say_more()


app = typer.Typer(
    name="torchtpu-cache",
    help="Every XLA program of a fleet is compiled once, anywhere, and is then ready everywhere.",
    cls=group_of(COMMANDS, {"verbose": _say_more}),
    **SETTINGS,
)


class _Notes(logging.Handler):
    """Log lines go the way of all notes: standard error as it is now, which may be under a progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            note(self.format(record))
        except Exception:
            self.handleError(record)


def _version(wanted: bool) -> None:
    if wanted:
        from torchtpu_cache_core import __version__

        print(f"torchtpu-cache {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what the cache does, on standard error.")
    ] = False,
) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[_Notes()])
    _say_more(verbose)


def _add_commands_of_other_packages() -> None:
    for register in registrars():
        register(app)


def _is_ours(arguments: list[str]) -> bool:
    """Whether a command of this package is asked for, so that no other needs to be known."""
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    return any(name == asked for name, *_ in COMMANDS)


def main() -> None:
    """Runs the command line; an expected error is one sentence and its exit code."""
    from torchtpu_cache_core.errors import CacheError, ConfigError, InvalidName, InvalidRequest

    if not _is_ours(sys.argv[1:]):
        _add_commands_of_other_packages()
    try:
        try:
            app()
        finally:
            print(end="", flush=True)  # here, where a reader that has gone away is expected
    except (ConfigError, InvalidName, InvalidRequest) as error:
        note(f"error: {error}")
        sys.exit(EXIT_USAGE)
    except CacheError as error:
        note(f"error: {error}")
        sys.exit(EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output is gone; a second complaint from the interpreter's own flush helps nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
