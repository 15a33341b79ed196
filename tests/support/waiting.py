"""Waits for something that happens elsewhere: by asking for it, never by hoping that some time is enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], otherwise: str, *, seconds: float = 30.0) -> None:
    """Returns as soon as `condition` holds; fails the test with `otherwise` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def rewrite(path: Path, text: str) -> None:
    """Writes a file in place, in another step of the kernel's coarse clock than the last change of it."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.write_text(text)
