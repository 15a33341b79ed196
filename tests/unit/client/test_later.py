"""Work in the background: in order, bounded, never in the way, waited for at the end. And warnings: few."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from support.forking import succeeds_in_fork
from support.waiting import wait_until
from torchtpu_cache.later import Later
from torchtpu_cache.sparing import SparingLog
from torchtpu_cache_core.testing.clock import ManualClock

Hold = Callable[..., bool]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


def held(later: Later, gate: threading.Event) -> None:
    """Occupies the thread until `gate` is set."""
    started = threading.Event()

    def work() -> None:
        started.set()
        assert gate.wait(30)

    assert later.do(work, 1)
    assert started.wait(30)


def test_works_are_done_in_order_and_a_flush_waits_for_them() -> None:
    later, done = Later(), []
    for number in range(100):
        assert later.do(lambda number=number: done.append(number), 1)  # type: ignore[misc]
    assert later.flush()
    assert done == list(range(100))


def test_what_is_slow_takes_a_tenth_of_the_time_and_waits_for_nothing_else() -> None:
    later, done = Later(), []
    for _ in range(3):
        later.do(lambda: (time.sleep(0.2), done.append("slow")), 1, slowly=True)  # type: ignore[func-returns-value]
    wait_until(lambda: bool(done), "nothing was done")
    started = time.monotonic()
    soon = threading.Event()
    later.do(soon.set, 1)
    assert soon.wait(30)
    assert time.monotonic() - started < 1.5, "it waited for a rest"
    assert done == ["slow"]
    assert later.flush()
    assert done == ["slow"] * 3
    assert time.monotonic() - started < 3.0, "a flush waits for no rest"


def test_too_much_is_the_callers_to_do(gate: threading.Event) -> None:
    later, done = Later(), []
    held(later, gate)
    taken = [later.do(lambda: done.append(1), 100 << 20) for _ in range(4)]
    assert taken == [True, True, False, False]
    assert [later.do(lambda: None, 1, slowly=True) for _ in range(1100)].count(True) == 1024
    gate.set()
    assert later.flush()
    assert len(done) == 2


def test_one_work_is_taken_whatever_it_holds(gate: threading.Event) -> None:
    later = Later()
    held(later, gate)
    assert later.do(lambda: None, 1 << 40)
    assert not later.do(lambda: None, 1)


def test_a_work_that_breaks_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    later, done = Later(), []

    def broken() -> None:
        raise RuntimeError("a bug")

    later.do(broken, 1)
    later.do(lambda: done.append(1), 1)
    assert later.flush()
    assert done == [1]
    assert "a bug" in caplog.text


def test_a_flush_ends_though_a_work_hangs(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtpu_cache.later._FLUSH_SECONDS", 0.1)
    monkeypatch.setattr("torchtpu_cache.later._SLOW_FLUSH_SECONDS", 0.1)
    later = Later()
    held(later, gate)
    assert not later.flush()
    monkeypatch.setattr("torchtpu_cache.later._FLUSH_SECONDS", 60)
    started = time.monotonic()
    later.close()
    assert time.monotonic() - started < 10, "the end of a job waits once"


def test_what_waits_is_done_at_the_end_and_then_no_more_is_taken() -> None:
    later, done = Later(), []
    for _ in range(50):
        later.do(lambda: done.append(1), 1, slowly=True)
    later.close()
    assert len(done) == 50
    assert not later.do(lambda: None, 1)
    later.close()


def test_a_forked_child_does_its_own_work_and_not_its_parents(gate: threading.Event) -> None:
    later, done = Later(), []
    held(later, gate)
    later.do(lambda: done.append("parent's"), 1)
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        later.do(lambda: done.append("child's"), 1)
        os.write(writing, b"%d %s" % (later.flush(), ",".join(done).encode()))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100) == b"1 child's"
    os.close(reading)
    os.close(writing)
    gate.set()
    assert later.flush()
    assert done == ["parent's"]


def test_a_topic_is_heard_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = SparingLog(logging.getLogger("test"), clock)
    for _ in range(3):
        log.warning("disk.full", "full: %s", "really")
        log.warning("disk.io", "broken")
    assert [record.getMessage() for record in caplog.records] == ["full: really", "broken"]
    clock.advance(61)
    log.warning("disk.full", "still full")
    assert caplog.records[-1].getMessage() == "still full"


# A fork of a threaded process is what is tried here.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_warns_though_a_thread_of_its_parent_was_about_to() -> None:
    log = SparingLog(logging.getLogger("test"), ManualClock())
    with log._state.get().lock:  # as a thread holds it that the fork leaves behind
        assert succeeds_in_fork(lambda: log.warning("disk.io", "broken"))
