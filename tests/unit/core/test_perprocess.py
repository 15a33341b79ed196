"""State per process: fresh in a forked child, one for all its threads, and never a lock that its parent held."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.forking import succeeds_in_fork
from torchtpu_cache_core.perprocess import PerProcess

# A fork of a threaded process is what is tried here.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

_THREADS = 8


class State:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_process_keeps_its_state() -> None:
    own = PerProcess(State)
    assert own.get() is own.get()


def test_all_threads_of_a_forked_child_get_the_same_fresh_state() -> None:
    parent = os.getpid()
    together = threading.Barrier(_THREADS)

    def make() -> State:
        if os.getpid() != parent:
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(2)  # so that all are past the look and before the setting
        return State()

    own = PerProcess(make)
    parents = own.get()

    def child() -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            states = set(pool.map(lambda _: own.get(), range(_THREADS)))
        assert len(states) == 1
        assert parents not in states
        assert own.get() in states

    assert succeeds_in_fork(child)
    assert own.get() is parents


def test_a_lock_that_is_held_at_the_fork_does_not_hang_the_child() -> None:
    own = PerProcess(State)

    def child() -> None:
        with own.get().lock:
            assert succeeds_in_fork(grandchild)

    def grandchild() -> None:
        with own.get().lock:
            pass

    with own.get().lock:
        assert succeeds_in_fork(child)


def test_the_parents_state_is_abandoned_once_and_only_in_the_child() -> None:
    abandoned: list[State] = []
    own = PerProcess(State, abandon=abandoned.append)
    parents = own.get()

    def child() -> None:
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda _: own.get(), range(_THREADS)))
        assert abandoned == [parents]

    assert succeeds_in_fork(child)
    assert own.get() is parents
    assert not abandoned
