"""Commands that the help of all commands tells of without importing them, and commands of other distributions."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        shared: options that it takes besides its own, and so does each command of a group.
    """

    def __init__(self, name: str, home: str, summary: str, shared: Sequence[Any] = ()) -> None:
        super().__init__(name, short_help=summary)
        self.home = home
        self._shared = shared

    def load(self) -> Any:
        """The command itself."""
        module, _, attribute = self.home.partition(":")
        made = getattr(import_module(module), attribute)
        part = typer.Typer(**SETTINGS)
        if isinstance(made, typer.Typer):
            part.add_typer(made, name=self.name)
        else:
            part.command(self.name)(made)
        loaded = typer.main.get_group(part).commands[self.name or ""]
        _take(loaded, self._shared)
        return loaded

    def make_context(self, *args: Any, **extra: Any) -> Any:
        return self.load().make_context(*args, **extra)


def group_of(
    commands: Sequence[tuple[str, str, str]], shared: Mapping[str, Callable[[bool], None]] = {}
) -> type[TyperGroup]:
    """A class for a Typer app that has these commands, each as LazyCommand takes it, before its own.

    Args:
        shared: names of switches of the app that each command takes as well, after its name, and what is told of them.
    """

    class Group(TyperGroup):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            switches = [_switch(own, shared[own.name]) for own in self.params if own.name in shared]
            for command in self.commands.values():
                _take(command, switches)
            lazy = {command[0]: LazyCommand(*command, shared=switches) for command in commands}
            self.commands = {**lazy, **self.commands}

    return Group


def _switch(own: Any, tell: Callable[[bool], None]) -> Any:
    """The same switch for a command, whose function does not take it."""
    switch = copy.copy(own)
    switch.expose_value = False
    switch.callback = lambda _context, _switch, value: tell(value)
    return switch


def _take(command: Any, shared: Sequence[Any]) -> None:
    command.params.extend(shared)
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            _take(each, shared)


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
