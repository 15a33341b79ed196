"""State that a forked child must not share with its parent."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """One state per process: a forked child starts with a fresh one. Thread-safe, without a lock of its own.

    A fork copies memory and one thread. Whatever else the parent's threads had in hand stays as it was in that moment:
    a lock that nobody gives back, work that its parent does, a socket that its parent reads from. So no object that
    has these is used in the child. All threads of the child get the same fresh state, even those that ask at once.

    The process is known by its number rather than by a hook at the fork, which sees only forks that Python makes.

    Args:
        make: makes a fresh state; called once more than needed, and the result dropped, where two threads ask at once.
        abandon: given the parent's state in the child, once; it must touch no lock that is in there.
    """

    def __init__(self, make: Callable[[], T], *, abandon: Callable[[T], object] | None = None) -> None:
        self._make = make
        self._abandon = abandon
        self._states: dict[int, T] = {os.getpid(): make()}

    def get(self) -> T:
        """The state of this process."""
        pid = os.getpid()
        state = self._states.get(pid)
        return self._renewed(pid) if state is None else state

    def _renewed(self, pid: int) -> T:
        inherited = [other for other in tuple(self._states) if other != pid]
        state = self._states.setdefault(pid, self._make())  # in one step, so that one thread's state wins
        for other in inherited:
            parents = self._states.pop(other, None)  # in one step too, so that one thread abandons it
            if parents is not None and self._abandon is not None:
                self._abandon(parents)
        return state
