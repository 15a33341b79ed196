"""The ways in which one meaning may be written otherwise, and the folder with the files that requests name."""

from __future__ import annotations

import enum
import functools
import hashlib
import operator
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from support.pairs.meanings import CONTENTS, FOLDERS, Value

_COPIES: Final = 3


class Noise(enum.IntFlag):
    """Ways to write one meaning otherwise."""

    NONE = 0
    OPTION_ORDER = enum.auto()
    MAP_ORDER = enum.auto()
    NUMBER_FORMS = enum.auto()
    PACKING = enum.auto()
    GIVEN_TWICE = enum.auto()
    SPLIT_MESSAGES = enum.auto()
    DUMP_OPTIONS = enum.auto()
    POSITIONS = enum.auto()
    FLAG_ORDER = enum.auto()
    FLAG_SPELLING = enum.auto()
    FLAG_REPEATED = enum.auto()
    DUMP_FLAGS = enum.auto()
    FLAG_FILES = enum.auto()
    COPIED_FILES = enum.auto()
    OTHER_VARIABLES = enum.auto()
    JOB_OPTIONS = enum.auto()
    PYTHON_ORDER = enum.auto()
    TARGET_NAME = enum.auto()
    PROGRAM_TEXT = enum.auto()


EVERY_NOISE: Final = functools.reduce(operator.or_, Noise)


class World:
    """The folder with the files that requests name.

    Args:
        folder: new, or of another process's world with the same files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[Path, bytes] = {}
        for copy in range(_COPIES):
            for number, content in enumerate(CONTENTS):
                self._write(folder / f"copy{copy}" / f"table{number}.{copy}", content)
            for number, files in enumerate(FOLDERS):
                for name, content in files.items():
                    self._write(folder / f"copy{copy}" / f"profiles{number}" / name, content)

    def path(self, value: Value, rng: random.Random, noise: Noise) -> str:
        """Of a file or folder that a value stands for."""
        copy = rng.randrange(_COPIES) if noise & Noise.COPIED_FILES else 0
        match value:
            case ("content", number):
                return str(self.folder / f"copy{copy}" / f"table{number}.{copy}")
            case ("folder", number):
                return str(self.folder / f"copy{copy}" / f"profiles{number}")
            case ("listing", number):
                listing = "".join(f"{len(n)}:{n}{hashlib.sha256(c).hexdigest()}" for n, c in FOLDERS[number].items())
                path = self.folder / f"listing{number}"
                self._write(path, listing.encode())
                return str(path)
            case ("path", slot, number):
                path = self.folder / "slots" / str(slot)
                self._write(path, CONTENTS[number])
                return str(path)
        raise ValueError(value)

    def flag_file(self, lines: Sequence[str]) -> str:
        """A file of flags, one a line or as the one line that it is."""
        text = "\n".join(lines).encode()
        path = self.folder / "flags" / hashlib.sha256(text).hexdigest()[:16]
        self._write(path, text)
        return str(path)

    def _write(self, path: Path, content: bytes) -> None:
        if self._written.get(path) != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            self._written[path] = content

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def riffled(groups: list[list[Any]], rng: random.Random) -> list[Any]:
    """All items, those of one group in their order."""
    order = [number for number, group in enumerate(groups) for _ in group]
    rng.shuffle(order)
    left = [iter(group) for group in groups]
    return [next(left[number]) for number in order]
