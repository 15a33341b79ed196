"""Fails a test in which anything was unpickled: entries are hostile bytes, and unpickling runs them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

_EVENTS: Final = frozenset({"pickle.find_class", "marshal.loads", "marshal.load", "exec"})


class _Watch:
    """An audit hook can never be removed, so one is installed for good and asked for what it saw."""

    def __init__(self) -> None:
        self.installed = False
        self.depth = 0
        self.seen: list[str] = []

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.depth and event in _EVENTS:
            self.seen.append(event)

    def install(self) -> None:
        if not self.installed:
            sys.addaudithook(self.hook)
            self.installed = True


_WATCH: Final = _Watch()


@contextlib.contextmanager
def no_unpickling() -> Iterator[None]:
    """Raises AssertionError at its end if anything was unpickled, unmarshalled or executed within, by any thread.

    Import what the block needs before it: a first import executes code.
    """
    _WATCH.install()
    _WATCH.depth += 1
    try:
        yield
    finally:
        _WATCH.depth -= 1
        seen, _WATCH.seen = _WATCH.seen, []
    assert not seen, f"code ran out of data: {seen}"
