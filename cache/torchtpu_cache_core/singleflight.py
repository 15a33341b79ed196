"""Single flight: of all threads that want one key at a time, one does the work and the others get its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    __slots__ = ("done", "result", "waiting")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.result: list[V] = []  # the one value; none where the leader failed
        self.waiting = 0


class SingleFlight(Generic[K, V]):
    """Runs one call per key at a time. Thread-safe; waiting on one key never delays another.

    A leader that fails, by whatever exception, wakes its waiters; they do not get its exception but try for
    themselves, one of them as the next leader, so that an interrupt in one thread is no answer to another.
    A `call` that asks for its own key again on the same thread would wait for itself; it must not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _flights and their counts, for moments only
        self._flights: dict[K, _Flight[V]] = {}

    def do(self, key: K, call: Callable[[], V]) -> tuple[V, bool]:
        """The result of `call`, and whether this thread ran it.

        Raises:
            whatever `call` raises, in the thread that ran it.
        """
        while True:
            with self._lock:
                flight = self._flights.get(key)
                if leads := flight is None:
                    flight = self._flights[key] = _Flight()
                else:
                    flight.waiting += 1
            if leads:
                return self._lead(key, flight, call), True
            flight.done.wait()
            if flight.result:
                return flight.result[0], False

    def waiting(self, key: K) -> int:
        """How many threads wait for the result of `key` now."""
        with self._lock:
            flight = self._flights.get(key)
            return 0 if flight is None else flight.waiting

    def _lead(self, key: K, flight: _Flight[V], call: Callable[[], V]) -> V:
        try:
            value = call()
            flight.result.append(value)
            return value
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()
