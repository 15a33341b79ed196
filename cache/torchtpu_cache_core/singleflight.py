"""Single flight: of all threads that want one key at a time, one does the work and the others get its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torchtpu_cache_core.perprocess import PerProcess

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Flight(Generic[V]):
    __slots__ = ("done", "leader", "result", "waiting")

    def __init__(self) -> None:
        self.leader = threading.get_ident()
        self.done = threading.Event()
        self.result: list[V] = []  # the one value; none where the leader failed
        self.waiting = 0


class _State(Generic[K, V]):
    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards the flights and their counts, for moments only
        self.flights: dict[K, _Flight[V]] = {}


class SingleFlight(Generic[K, V]):
    """Runs one call per key at a time. Thread-safe, and safe to use after a fork; waiting on one key never delays
    another.

    A leader that fails, by whatever exception, wakes its waiters; they do not get its exception but try for
    themselves, one of them as the next leader, so that an interrupt in one thread is no answer to another.
    A thread that asks for the key that it leads already, as a signal's handler may, does the work by itself.
    """

    def __init__(self) -> None:
        self._state: PerProcess[_State[K, V]] = PerProcess(_State)

    def do(self, key: K, call: Callable[[], V]) -> tuple[V, bool]:
        """The result of `call`, and whether this thread ran it.

        Raises:
            whatever `call` raises, in the thread that ran it.
        """
        state = self._state.get()
        while True:
            with state.lock:
                flight = state.flights.get(key)
                if leads := flight is None:
                    flight = state.flights[key] = _Flight()
                elif flight.leader != threading.get_ident():
                    flight.waiting += 1
            if leads:
                return _lead(state, key, flight, call), True
            if flight.leader == threading.get_ident():
                return call(), True
            flight.done.wait()
            if flight.result:
                return flight.result[0], False

    def waiting(self, key: K) -> int:
        """How many threads wait for the result of `key` now."""
        state = self._state.get()
        with state.lock:
            flight = state.flights.get(key)
            return 0 if flight is None else flight.waiting


def _lead(state: _State[K, V], key: K, flight: _Flight[V], call: Callable[[], V]) -> V:
    try:
        value = call()
        flight.result.append(value)
        return value
    finally:
        with state.lock:
            del state.flights[key]
        flight.done.set()
