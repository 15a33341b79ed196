"""Commands that the help of all commands tells of without importing them, and commands of other distributions."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

GROUP: Final = "torchtpu_cache.commands"
"""The entry points by which other distributions add commands."""

SETTINGS: Final[dict[str, Any]] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Of the whole command line."""


class LazyCommand(TyperCommand):
    """Stands for a command, or for a group of them, until it is asked for.

    Args:
        home: `module:attribute` of the function or of the group's Typer app.
        summary: what the command's own help begins with.
    """

    def __init__(self, name: str, home: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self.home = home

    def load(self) -> Any:
        """The command itself."""
        module, _, attribute = self.home.partition(":")
        made = getattr(import_module(module), attribute)
        part = typer.Typer(**SETTINGS)
        if isinstance(made, typer.Typer):
            part.add_typer(made, name=self.name)
        else:
            part.command(self.name)(made)
        return typer.main.get_group(part).commands[self.name or ""]

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self.load().make_context(*args, **extra)


def group_of(commands: Sequence[tuple[str, str, str]]) -> type[TyperGroup]:
    """A class for a Typer app that has these commands, each as LazyCommand takes it, before its own."""

    class Group(TyperGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.commands = {**{command[0]: LazyCommand(*command) for command in commands}, **self.commands}

    return Group


def registrars() -> Iterator[Any]:
    """The functions that add the commands of other distributions, each once.

    They are read from the folders of the import path, as they lie there after an installation: `importlib.metadata`,
    which also looks into archives, takes as long to import as all the rest of a command's help.
    """
    homes = dict.fromkeys(home for folder in sys.path for home in _homes(Path(folder or ".")))
    for home in homes:
        module, _, function = home.partition(":")
        yield getattr(import_module(module), function)


def _homes(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.dist-info/entry_points.txt")):
        section = ""
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            text = line.strip()
            if text.startswith("["):
                section = text.strip("[] ")
            elif section == GROUP and "=" in text and not text.startswith(("#", ";")):
                yield text.partition("=")[2].partition("[")[0].strip()
