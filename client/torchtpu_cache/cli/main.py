"""The command line: `torchtpu-cache`, short `ttc`.

Each command's work is imported when it runs, so that `--help` costs little more than the interpreter.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from typing import Annotated, Final

import typer

from torchtpu_cache.cli import cache, compile, config, demo, dev, doctor, status
from torchtpu_cache.cli.output import EXIT_FAILED, EXIT_USAGE, note

_OUR_LOGGERS: Final = ("torchtpu_cache", "torchtpu_cache_core", "torchtpu_cache_server")

app = typer.Typer(
    name="torchtpu-cache",
    help="Every XLA program of a fleet is compiled once, anywhere, and is then ready everywhere.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compile")(compile.compile_files)
app.command("demo")(demo.demo)
app.command("status")(status.status)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.add_typer(dev.app, name="dev")
app.add_typer(config.app, name="config")


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
    if verbose:
        for name in _OUR_LOGGERS:
            logging.getLogger(name).setLevel(logging.INFO)


def _add_commands_of_other_packages() -> None:
    for entry_point in importlib.metadata.entry_points(group="torchtpu_cache.commands"):
        entry_point.load()(app)


def main() -> None:
    """Runs the command line; an expected error is one sentence and its exit code."""
    from torchtpu_cache_core.errors import CacheError, ConfigError, InvalidName, InvalidRequest

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
