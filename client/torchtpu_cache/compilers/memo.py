"""Remembers target descriptions on this machine, so that a warm hit loads no libtpu.

One small file per (compiler, topology, environment), named by their digest: the SHA-256 of the rest as a hex line, then
JSON. A memo that is absent, foreign, damaged or cannot be written costs one description, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

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
        self._lock = threading.Lock()  # guards _known
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
        if self._folder is None:
            return
        body = json.dumps({"question": asked, "parts": parts}, sort_keys=True).encode()
        # Without a writable folder the next process describes the target again.
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, temp = tempfile.mkstemp(dir=self._folder, prefix=".target-")
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                Path(temp).replace(self._path(self._folder, asked))
            except BaseException:
                Path(temp).unlink(missing_ok=True)
                raise

    def _read(self, asked: str) -> dict[str, str] | None:
        if self._folder is None:
            return None
        try:
            fd = os.open(self._path(self._folder, asked), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                found = os.fstat(fd)
                # Who can write a memo can send a request to another target's entry.
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                    return None
                digest, _, body = file.read(_MAX_BYTES).partition(b"\n")
        except OSError:
            return None
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        match json.loads(body):
            case {"question": str(question), "parts": dict(parts)} if question == asked:
                return {str(name): str(value) for name, value in parts.items()}
        return None

    @staticmethod
    def _path(folder: Path, asked: str) -> Path:
        return folder / f"target-{asked}"


def _asked(question: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *question]).encode()).hexdigest()
