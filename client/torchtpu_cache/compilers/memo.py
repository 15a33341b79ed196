"""Remembers target descriptions on this machine, so that a warm hit loads no libtpu.

One note (`torchtpu_cache_core.notes`) per compiler, topology and environment, named by their digest. Where it is absent
or cannot be written, that costs one description.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torchtpu_cache_core.notes import read_note, write_note

_VERSION: Final = 1
"""Changes with the parts that a description gives, so that an older release's memo is not taken for ours."""

_MAX_BYTES: Final = 1 << 16


class TargetMemo:
    """Parts by what they were described from. Thread-safe.

    Args:
        folder: private to this user, made where it is absent; None remembers in this process only.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.RLock()  # guards _known
        self._known: dict[str, dict[str, str]] = {}

    def get(self, question: Iterable[str]) -> dict[str, str] | None:
        """The parts that were put for the same question, or None."""
        asked = _asked(question)
        with self._lock:
            known = self._known.get(asked)
        if known is None and (known := self._read(asked)) is not None:
            with self._lock:
                self._known[asked] = known
        return None if known is None else dict(known)

    def put(self, question: Iterable[str], parts: dict[str, str]) -> None:
        """Remembers `parts` for this process, and for the machine where the folder can be written to."""
        asked = _asked(question)
        with self._lock:
            self._known[asked] = dict(parts)
        if self._folder is not None:
            write_note(self._path(self._folder, asked), {"question": asked, "parts": parts}, _MAX_BYTES)

    def _read(self, asked: str) -> dict[str, str] | None:
        note = None if self._folder is None else read_note(self._path(self._folder, asked), _MAX_BYTES)
        if note is None:
            return None
        match note.value:
            case {"question": str(question), "parts": dict(parts)} if question == asked:
                return {str(name): str(value) for name, value in parts.items()}
        return None

    @staticmethod
    def _path(folder: Path, asked: str) -> Path:
        return folder / f"target-{asked}"


def _asked(question: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *question]).encode()).hexdigest()
