"""The circuit breaker: when it opens and closes, what it costs, what it does not take for an outage."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torchtpu_cache.breaker import BreakerOpen, BreakerSettings, BreakerStore
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    FailureKind,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, Store, Stored, StoreStats
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for

ENTRY = entry_for("the entry")


class Failing(Store):
    """A memory store that raises `error` from every call while it is set, and counts its calls."""

    def __init__(self) -> None:
        self._inner = MemoryStore(limit_bytes=1 << 20)
        self.error: Exception | None = None
        self.calls = 0

    def _call(self) -> Store:
        self.calls += 1
        if self.error is not None:
            raise self.error
        return self._inner

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def get(self, key: Key) -> Stored | None:
        return self._call().get(key)

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        return self._call().put(entry, attestation)

    def contains(self, key: Key) -> bool:
        return self._call().contains(key)

    def delete(self, key: Key) -> bool:
        return self._call().delete(key)

    def iterate(self) -> Iterator[EntryInfo]:
        yield from self._call().iterate()

    def stats(self) -> StoreStats:
        return self._call().stats()


@pytest.fixture
def inner() -> Failing:
    return Failing()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def breaker(inner: Failing, clock: ManualClock) -> Iterator[BreakerStore]:
    """One whose background probe never gets to run, so that a test probes by hand."""
    settings = BreakerSettings(first_probe_seconds=1e6, longest_probe_seconds=1e6)
    with BreakerStore(inner, settings=settings, clock=clock, jitter=lambda: 0.0) as store:
        yield store


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get(ENTRY.key),
    "contains": lambda store: store.contains(ENTRY.key),
    "iterate": lambda store: list(store.iterate()),
    "stats": lambda store: store.stats(),
    "put": lambda store: store.put(ENTRY),
    "delete": lambda store: store.delete(ENTRY.key),
}


def fail(store: BreakerStore, inner: Failing, error: Exception, call: str = "get") -> None:
    inner.error = error
    with pytest.raises(type(error)):
        CALLS[call](store)
    inner.error = None


# ---- opening ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", [FailureKind.CONNECT, FailureKind.TIMEOUT])
def test_a_dead_store_is_asked_once(breaker: BreakerStore, inner: Failing, call: str, kind: FailureKind) -> None:
    fail(breaker, inner, StoreUnavailable("it is dead", kind), call)
    asked = inner.calls
    for name in CALLS:
        with pytest.raises(BreakerOpen, match="not asked, since it is dead") as caught:
            CALLS[name](breaker)
        assert caught.value.kind is kind
    assert inner.calls == asked
    status = breaker.status
    assert (status.open, status.kind, status.reason) == (True, kind, "it is dead")
    assert (status.opened_total, status.skipped_total, status.refused_total) == (1, len(CALLS), 0)


@pytest.mark.parametrize(
    "error",
    [
        StoreUnavailable("x", FailureKind.RESET),
        StoreUnavailable("x", FailureKind.SERVER_ERROR),
        StoreUnavailable("x", FailureKind.THROTTLED),
        StoreUnavailable("x", FailureKind.IO),
        StoreRefused("x", FailureKind.PROTOCOL),
    ],
)
def test_other_failures_open_it_after_three_in_a_row(breaker: BreakerStore, inner: Failing, error: StoreError) -> None:
    for _ in range(2):
        fail(breaker, inner, error)
        fail(breaker, inner, error)
        assert breaker.get(ENTRY.key) is None  # an answer in between, if only a miss
    assert not breaker.status.open
    for _ in range(3):
        fail(breaker, inner, error)
    assert breaker.status.open


def test_a_store_that_asks_to_wait_is_left_alone(breaker: BreakerStore, inner: Failing) -> None:
    fail(breaker, inner, StoreUnavailable("busy", FailureKind.THROTTLED, retry_after_seconds=7.0))
    with pytest.raises(BreakerOpen):
        breaker.get(ENTRY.key)


@pytest.mark.parametrize("error", [EntryTooLarge(5, 4), CorruptEntry(CorruptReason.DIGEST), EntryTooLarge(5, None)])
def test_what_concerns_one_entry_never_opens_it(breaker: BreakerStore, inner: Failing, error: StoreError) -> None:
    for _ in range(20):
        fail(breaker, inner, error)
    assert not breaker.status.open
    assert breaker.get(ENTRY.key) is None
    breaker.put(ENTRY)
    assert breaker.get(ENTRY.key) is not None


def test_a_bug_in_a_store_passes_through(breaker: BreakerStore, inner: Failing) -> None:
    fail(breaker, inner, ZeroDivisionError())
    assert not breaker.status.open


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FailureKind.FORBIDDEN, FailureKind.READ_ONLY, FailureKind.UNAUTHORIZED])
def test_a_read_only_client_offers_once(
    breaker: BreakerStore, inner: Failing, clock: ManualClock, kind: FailureKind
) -> None:
    fail(breaker, inner, StoreRefused("you may not", kind), "put")
    asked = inner.calls
    for _ in range(3):
        with pytest.raises(StoreRefused, match="not asked again, since you may not") as caught:
            breaker.put(ENTRY)
        assert caught.value.kind is kind
    assert inner.calls == asked
    assert breaker.get(ENTRY.key) is None  # reads go on
    assert not breaker.status.open
    assert breaker.status.refused_total == 3
    clock.advance(301)
    breaker.put(ENTRY)
    assert breaker.get(ENTRY.key) is not None


def test_refused_reads_do_not_stop_writes(breaker: BreakerStore, inner: Failing) -> None:
    fail(breaker, inner, StoreRefused("you may not", FailureKind.FORBIDDEN), "get")
    with pytest.raises(StoreRefused):
        breaker.contains(ENTRY.key)
    breaker.put(ENTRY)


def test_a_full_store_is_offered_nothing_for_a_while(breaker: BreakerStore, inner: Failing, clock: ManualClock) -> None:
    fail(breaker, inner, StoreFull("no room"), "put")
    with pytest.raises(StoreFull):
        breaker.put(ENTRY)
    assert inner.calls == 1
    assert breaker.get(ENTRY.key) is None
    assert breaker.delete(ENTRY.key) is False  # a delete is what makes room
    clock.advance(31)
    breaker.put(ENTRY)


# ---- closing ---------------------------------------------------------------------------------------------------


def test_a_probe_that_is_answered_closes_it(breaker: BreakerStore, inner: Failing) -> None:
    dead = StoreUnavailable("it is dead", FailureKind.CONNECT)
    fail(breaker, inner, dead)
    inner.error = StoreUnavailable("still dead", FailureKind.TIMEOUT)
    assert breaker.probe_once() is False
    assert breaker.status.open
    inner.error = None
    assert breaker.probe_once() is True
    assert not breaker.status.open
    assert breaker.get(ENTRY.key) is None
    assert breaker.status.kind is None


def test_a_refused_probe_is_an_answer(breaker: BreakerStore, inner: Failing) -> None:
    fail(breaker, inner, StoreUnavailable("it is dead", FailureKind.CONNECT))
    inner.error = StoreRefused("no token", FailureKind.UNAUTHORIZED)
    assert breaker.probe_once() is True
    with pytest.raises(StoreRefused):
        breaker.get(ENTRY.key)


def test_the_probe_can_be_another_call(inner: Failing, clock: ManualClock) -> None:
    probed = []
    settings = BreakerSettings(first_probe_seconds=1e6, longest_probe_seconds=1e6)
    with BreakerStore(inner, probe=lambda: probed.append(1), settings=settings, clock=clock) as breaker:
        fail(breaker, inner, StoreUnavailable("x", FailureKind.CONNECT))
        assert breaker.probe_once()
    assert probed == [1]


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 1.0), (0.999999, 0.5)])
def test_probes_come_ever_more_seldom_until_a_real_call_succeeds(
    inner: Failing, clock: ManualClock, jitter: float, share: float
) -> None:
    breaker = BreakerStore(inner, clock=clock, jitter=lambda: jitter)
    breaker._probe_until_closed = lambda circuit: None  # type: ignore[method-assign]
    pauses: list[float] = []

    def pause() -> float:
        return (breaker._circuit.get().not_before - clock.monotonic()) / share

    dead = StoreUnavailable("it is dead", FailureKind.CONNECT)
    fail(breaker, inner, dead)
    pauses.append(pause())
    for _ in range(8):
        inner.error = dead
        breaker.probe_once()
        pauses.append(pause())
    assert pauses == pytest.approx([0.5, 1, 2, 4, 8, 16, 30, 30, 30], rel=1e-3)
    inner.error = None
    assert breaker.probe_once()
    fail(breaker, inner, dead)  # it answers probes and nothing else: no start from 0.5 s
    assert pause() == pytest.approx(30, rel=1e-3)
    assert breaker.probe_once()
    assert breaker.get(ENTRY.key) is None
    fail(breaker, inner, dead)
    assert pause() == pytest.approx(0.5, rel=1e-3)
    inner.error = StoreUnavailable("busy", FailureKind.THROTTLED, retry_after_seconds=120.0)
    breaker.probe_once()
    assert pause() * share == pytest.approx(120)


def test_it_recovers_in_the_background_with_one_thread(inner: Failing) -> None:
    settings = BreakerSettings(first_probe_seconds=0.01, longest_probe_seconds=0.02)
    probes = 0

    def probe() -> None:
        nonlocal probes
        probes += 1
        if probes == 2:
            raise ZeroDivisionError  # a probe that breaks the contract does not end the probing
        if probes < 4:
            raise StoreUnavailable("still dead", FailureKind.CONNECT)

    def probing() -> int:
        return sum(thread.name == "breaker-probe" for thread in threading.enumerate())

    with BreakerStore(inner, probe=probe, settings=settings) as breaker:
        assert probing() == 0
        fail(breaker, inner, StoreUnavailable("it is dead", FailureKind.CONNECT))
        assert probing() == 1
        deadline = time.monotonic() + 10
        while breaker.status.open and time.monotonic() < deadline:
            time.sleep(0.005)
        assert breaker.get(ENTRY.key) is None
        assert probes == 4
        while probing() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert probing() == 0


def test_closing_the_store_ends_the_probing(inner: Failing) -> None:
    settings = BreakerSettings(first_probe_seconds=0.01)
    with BreakerStore(inner, settings=settings) as breaker:
        inner.error = StoreUnavailable("it is dead", FailureKind.CONNECT)
        with pytest.raises(StoreUnavailable):
            breaker.get(ENTRY.key)
    deadline = time.monotonic() + 10
    while any(thread.name == "breaker-probe" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- cost, threads, forks --------------------------------------------------------------------------------------


def test_an_open_breaker_costs_next_to_nothing(breaker: BreakerStore, inner: Failing) -> None:
    fail(breaker, inner, StoreUnavailable("it is dead", FailureKind.CONNECT))
    fastest = float("inf")
    for _ in range(50):
        started = time.perf_counter()
        with pytest.raises(BreakerOpen):
            breaker.get(ENTRY.key)
        fastest = min(fastest, time.perf_counter() - started)
    assert fastest < 0.0001


def test_many_threads_open_it_once(inner: Failing, clock: ManualClock) -> None:
    settings = BreakerSettings(first_probe_seconds=1e6, longest_probe_seconds=1e6)
    inner.error = StoreUnavailable("it is dead", FailureKind.TIMEOUT)
    start = threading.Barrier(8)
    with BreakerStore(inner, settings=settings, clock=clock) as breaker:

        def work() -> None:
            start.wait()
            for _ in range(50):
                with pytest.raises(StoreUnavailable):
                    breaker.get(ENTRY.key)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert breaker.status.opened_total == 1
        assert inner.calls + breaker.status.skipped_total == 400
        assert inner.calls <= 8


# A fork of a threaded process is what is tried here.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_starts_closed_and_holds_no_lock_of_its_parent(breaker: BreakerStore, inner: Failing) -> None:
    fail(breaker, inner, StoreUnavailable("it is dead", FailureKind.CONNECT))
    with breaker._circuit.get().lock:
        pid = os.fork()
        if pid == 0:
            try:
                assert breaker.get(ENTRY.key) is None
                assert not breaker.status.open
                os._exit(0)
            except BaseException:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert breaker.status.open
