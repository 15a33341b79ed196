"""Work that no caller waits for: one thread per node packs what was compiled, and writes it and what came from afar.

Two queues. What was worth a wait is done at once, in the order in which it came. What compiled in under 10 ms is done
slowly, for a tenth of the thread's time at most: a job may compile thousands of programs in a millisecond each, and
writing all of them would make the cache slower than none, and have four such jobs fight for the disk. Both queues are
short. Where one is full, the caller does the work itself, or leaves it.

A process that dies loses what waits: it is compiled or fetched again. One that ends waits for it a few seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from torchtpu_cache_core.perprocess import PerProcess

_log = logging.getLogger(__name__)

Work = Callable[[], object]
"""Handles its own failures; one that raises all the same is logged and passed by."""

_MAX_WAITING_BYTES: Final = 256 << 20
_MAX_SLOW_BYTES: Final = 32 << 20
_MAX_WORKS: Final = 1024
_REST_PER_WORK: Final = 9.0
_FLUSH_SECONDS: Final = 5.0
_SLOW_FLUSH_SECONDS: Final = 1.0


class _Queue:
    """Works in order, with what they hold in memory."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._works: deque[tuple[Work, int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._works)

    def has_room(self, size_bytes: int) -> bool:
        """One that is alone is taken, whatever its size."""
        fits = len(self._works) < _MAX_WORKS and self._bytes + size_bytes <= self._max_bytes
        return fits or not self._works

    def add(self, work: Work, size_bytes: int) -> None:
        self._works.append((work, size_bytes))
        self._bytes += size_bytes

    def take(self) -> Work:
        work, size_bytes = self._works.popleft()
        self._bytes -= size_bytes
        return work


class _State:
    def __init__(self) -> None:
        self.changed = threading.Condition()  # guards all below
        self.soon = _Queue(_MAX_WAITING_BYTES)
        self.slow = _Queue(_MAX_SLOW_BYTES)
        self.slow_not_before = 0.0
        self.busy = False
        self.flushing = 0
        self.gave_up = False  # no work has ended since a flush waited in vain
        self.closed = False
        self.thread: threading.Thread | None = None


class Later:
    """Does work in the background. Thread-safe, and safe to use after a fork: the parent does what waits in it."""

    def __init__(self) -> None:
        self._state = PerProcess(_State)

    def do(self, work: Work, size_bytes: int, *, slowly: bool = False) -> bool:
        """Takes work to do; False, and it is the caller's still, where too much waits or this is closed.

        Args:
            size_bytes: what the work keeps in memory until it is done.
        """
        state = self._state.get()
        with state.changed:
            queue = state.slow if slowly else state.soon
            if state.closed or not queue.has_room(size_bytes):
                return False
            if state.thread is None:
                thread = threading.Thread(target=_loop, args=(state,), name="torchtpu-cache-later", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread to be had
                    return False
                state.thread = thread
            if not (slowly and queue):  # else the thread is at work, or rests
                state.changed.notify_all()
            queue.add(work, size_bytes)
            return True

    def flush(self) -> bool:
        """Waits until nothing waits, a few seconds at most; whether that came to be."""
        state = self._state.get()
        with state.changed:
            state.flushing += 1
            state.changed.notify_all()
            try:
                soon = state.changed.wait_for(lambda: not (state.soon or state.busy), _FLUSH_SECONDS)
                slow = state.changed.wait_for(lambda: not (state.slow or state.busy), _SLOW_FLUSH_SECONDS)
                state.gave_up = not (soon and slow)
                return soon and slow
            finally:
                state.flushing -= 1

    def close(self) -> None:
        """Flushes, unless that was just in vain, and takes no more. Closing twice is harmless."""
        state = self._state.get()
        if not state.gave_up:
            self.flush()
        with state.changed:
            state.closed = True
            state.changed.notify_all()


def _loop(state: _State) -> None:
    while (following := _next(state)) is not None:
        work, slowly = following
        started = time.monotonic()
        try:
            work()
        except Exception:
            _log.exception("work in the background failed")
        if slowly:
            ended = time.monotonic()
            state.slow_not_before = ended + _REST_PER_WORK * (ended - started)
        del work, following  # they may hold an executable while the thread waits


def _next(state: _State) -> tuple[Work, bool] | None:
    """Waits for the next work, and gives it with whether it is to be done slowly; None at the end."""
    with state.changed:
        state.busy = state.gave_up = False
        state.changed.notify_all()
        while not state.closed:
            rest = 0.0 if state.flushing else state.slow_not_before - time.monotonic()
            slowly = not state.soon
            if state.soon or (state.slow and rest <= 0):
                state.busy = True
                return (state.slow if slowly else state.soon).take(), slowly
            state.changed.wait(rest if state.slow else None)
        return None
