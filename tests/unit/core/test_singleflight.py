"""Single flight among threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.forking import succeeds_in_fork
from support.waiting import wait_until
from torchtpu_cache_core.singleflight import SingleFlight


class Cancelled(BaseException):
    """Like KeyboardInterrupt, without stopping the test run."""


class Slow:
    """A call that says when it began and ends when told to."""

    def __init__(self, end: Callable[[], int]) -> None:
        self.began = threading.Event()
        self.go = threading.Event()
        self.end = end

    def __call__(self) -> int:
        self.began.set()
        assert self.go.wait(10)
        return self.end()


def _raise(error: BaseException) -> int:
    raise error


def test_waiters_get_the_leaders_result() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow(lambda: 42)
    with ThreadPoolExecutor(5) as pool:
        leader = pool.submit(flights.do, "key", slow)
        assert slow.began.wait(10)
        waiters = [pool.submit(flights.do, "key", lambda: _raise(AssertionError("ran twice"))) for _ in range(4)]
        wait_until(lambda: flights.waiting("key") == 4, "they do not all wait")
        slow.go.set()
        assert leader.result(10) == (42, True)
        assert [w.result(10) for w in waiters] == [(42, False)] * 4


@pytest.mark.parametrize("error", [ValueError("no"), Cancelled()])
def test_a_leader_that_fails_wakes_waiters_who_try_themselves(error: BaseException) -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow(lambda: _raise(error))
    runs: list[int] = []

    def mine() -> int:
        runs.append(1)
        return 7

    failures: list[BaseException] = []

    def lead() -> None:
        try:
            flights.do("key", slow)
        except BaseException as raised:
            failures.append(raised)

    leader = threading.Thread(target=lead)
    leader.start()
    assert slow.began.wait(10)
    with ThreadPoolExecutor(3) as pool:
        waiters = [pool.submit(flights.do, "key", mine) for _ in range(3)]
        wait_until(lambda: flights.waiting("key") == 3, "they do not all wait")
        slow.go.set()
        results = [w.result(10) for w in waiters]
    leader.join(10)
    assert failures == [error]
    assert [value for value, _ in results] == [7, 7, 7]
    assert 1 <= len(runs) == sum(leads for _, leads in results) <= 3


def test_keys_do_not_wait_for_each_other() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    slow = Slow(lambda: 1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(flights.do, "slow", slow)
        assert slow.began.wait(10)
        assert flights.do("other", lambda: 2) == (2, True)
        slow.go.set()
        assert first.result(10) == (1, True)


def test_a_result_is_not_kept() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    assert flights.do("key", lambda: 1) == (1, True)
    assert flights.do("key", lambda: 2) == (2, True)


# A fork of a threaded process is what is tried here.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_waits_for_no_flight_of_its_parent() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    began, end = threading.Event(), threading.Event()

    def call() -> int:
        began.set()
        assert end.wait(30)
        return 1

    def child() -> None:
        assert flights.waiting("key") == 0
        assert flights.do("key", lambda: 2) == (2, True)

    leader = threading.Thread(target=flights.do, args=("key", call))
    leader.start()
    try:
        assert began.wait(30)
        assert succeeds_in_fork(child)
    finally:
        end.set()
        leader.join()
