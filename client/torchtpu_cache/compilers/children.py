"""Compiles in processes that may die: what this side needs to start them, ask them, and word their ends.

A child serves one environment and one compiler file for its whole life, because XLA reads its flags once, when it
initialises. Its environment is this process's own, with the code-relevant variables set to what the request says.
"""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchtpu_cache.compilers.base import Progress
from torchtpu_cache.compilers.messages import last_words
from torchtpu_cache_core.canonical.rules import KEPT_PREFIXES, KEPT_VARIABLES
from torchtpu_cache_core.canonical.wire import WireError, read_fields
from torchtpu_cache_core.child import ChildDied, ChildProcess, ChildTimeout
from torchtpu_cache_core.config import VARIABLE_PREFIX
from torchtpu_cache_core.errors import CompilerCrashed, CompilerMissing, InvalidRequest

if TYPE_CHECKING:
    from torchtpu_cache_core.canonical.environment import Environment

_PROGRESS_SECONDS: Final = 1.0
_ENDED_BY_OTHERS: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes that say nothing of the program: it is compiled once more. The kernel, out of memory, takes a child first,
perhaps for the sake of others."""
_BUILD_OPTIONS_FIELD: Final = 3


def child_environ(environ: Mapping[str, str], environment: Environment, extra: Mapping[str, str]) -> dict[str, str]:
    """A compile child's whole environment.

    Args:
        environ: what the rest comes from, this process's own as a rule.
        environment: its variables are set as they are, and of their kind no other is: what is left out of the key
            says which devices and processes the job has, and the child has none of them.
        extra: set last; for what only says how to start and where to log.
    """
    child = {
        name: value
        for name, value in environ.items()
        # Tokens of ours are no business of a compiler that parses foreign programs.
        if not name.startswith((*KEPT_PREFIXES, VARIABLE_PREFIX)) and name not in KEPT_VARIABLES
    }
    child.update(environment.variables)
    child.update(extra)
    # `python -m` would import from the working directory first, whatever lies there.
    child["PYTHONSAFEPATH"] = "1"
    return child


def served(library: Path, compiler: str, environment: Environment) -> str:
    """Names what a child has taken in for good when it starts: the compiler's file, and the files that flags name.

    Args:
        compiler: SHA-256 of the library; empty where it has no identity.
    """
    seen = json.dumps([str(library), compiler, environment.parts])
    return hashlib.sha256(seen.encode("utf-8", "surrogateescape")).hexdigest()


def check_options(options: bytes) -> None:
    """Refuses bytes that are no CompileOptionsProto. XLA's readers would take what they can and guess the rest.

    Raises:
        InvalidRequest: the message, or its executable build options, cannot be read.
    """
    try:
        for field in read_fields(options):
            if field.number == _BUILD_OPTIONS_FIELD and isinstance(field.value, bytes):
                read_fields(field.value)
    except WireError as error:
        raise InvalidRequest(f"the compile options are no serialised CompileOptionsProto: {error}") from None


MOST_RESIDENT_BYTES: Final = 4 << 30


class ChildPool:
    """At most `size` children of one module, each for one environment and compiler at a time. Thread-safe.

    Args:
        module: whose `main` calls `torchtpu_cache_core.child.serve`.
        size: how many may work at once; further calls wait.
        deadline_seconds: for one call, unless the call names its own.
        most_resident_bytes: a child that holds more after a call is ended. libtpu keeps what a large program took.
    """

    def __init__(
        self,
        module: str,
        *,
        size: int,
        deadline_seconds: float,
        most_resident_bytes: int = MOST_RESIDENT_BYTES,
    ) -> None:
        self._module = module
        self._most_resident_bytes = most_resident_bytes
        self._size = size
        self._deadline_seconds = deadline_seconds
        self._changed = threading.Condition()  # guards what follows
        self._idle: list[tuple[object, ChildProcess]] = []
        self._busy: set[ChildProcess] = set()
        self._closed = False

    def call(
        self,
        environ: Mapping[str, str],
        compiler: str,
        header: Mapping[str, Any],
        payload: bytes = b"",
        *,
        deadline_seconds: float | None = None,
        progress: Progress | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Asks a child that runs under `environ` and has loaded `compiler`, starting it where there is none.

        Args:
            environ: the child's whole environment.
            compiler: what `served` gives, so that a child outlives no replaced package or flag file.

        Raises:
            CompilerCrashed: the child died or overran its deadline; the next call starts another.
            CompilerMissing: the child cannot import the compiler.
        """
        seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        with ticking(progress), self._child(environ, compiler) as child:
            try:
                try:
                    answer, result = child.call(header, payload, deadline_seconds=seconds)
                except ChildDied as error:
                    if error.returncode not in _ENDED_BY_OTHERS:
                        raise
                    answer, result = child.call(header, payload, deadline_seconds=seconds)
            except ChildTimeout:
                raise CompilerCrashed(f"the compiler did not finish within {seconds:g} seconds and was ended") from None
            except ChildDied as error:
                raise CompilerCrashed(f"the compiler's process died: {last_words(error.stderr_tail)}") from None
            if child.resident_bytes() > self._most_resident_bytes:
                child.close()  # the next call starts another
        if "missing" in answer:
            raise CompilerMissing(answer["missing"])
        return answer, result

    def pids(self) -> list[int]:
        """Of the children that run now."""
        with self._changed:
            children = [*(child for _, child in self._idle), *self._busy]
        return [child.pid for child in children if child.pid is not None]

    def close(self) -> None:
        """Ends the children, a busy one after its call. No call may follow; closing twice is harmless."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, child in idle:
            child.close()

    @contextmanager
    def _child(self, environ: Mapping[str, str], compiler: str) -> Iterator[ChildProcess]:
        key = (compiler, tuple(sorted(environ.items())))
        with self._changed:
            child = self._take(key)
            while child is None:
                if len(self._idle) + len(self._busy) < self._size:
                    child = ChildProcess(self._module, environ)
                elif self._idle:
                    # Longest idle first; it served another environment or another compiler.
                    self._idle.pop(0)[1].close()
                else:
                    self._changed.wait()
                    child = self._take(key)
            self._busy.add(child)
        try:
            yield child
        finally:
            with self._changed:
                self._busy.remove(child)
                if self._closed:
                    child.close()
                else:
                    self._idle.append((key, child))
                self._changed.notify()

    def _take(self, key: object) -> ChildProcess | None:
        for index, (served, child) in enumerate(self._idle):
            if served == key:
                del self._idle[index]
                return child
        return None


@contextmanager
def ticking(progress: Progress | None) -> Iterator[None]:
    """Tells `progress` about once a second how long the block has run."""
    if progress is None:
        yield
        return
    started = time.monotonic()
    done = threading.Event()

    def tick() -> None:
        while not done.wait(_PROGRESS_SECONDS):
            try:
                progress(time.monotonic() - started)
            except Exception:  # a display that fails costs the display, not the compile
                return

    ticker = threading.Thread(target=tick, name="compile-progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
