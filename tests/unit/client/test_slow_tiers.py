"""A node over a tier that is right and slow: its cost is bounded, and its hits are used while they pay."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from support.fakes import FailingStore, FakeCompiler, RawResolver, request
from support.peers import body_stops
from support.rawserver import RawServer
from torchtpu_cache import later
from torchtpu_cache.counters import Tier
from torchtpu_cache.gate import CREDIT_SECONDS, SHARE
from torchtpu_cache.node import Node
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import FailureKind, StoreRefused, StoreUnavailable
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import PutOutcome, Store
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.stores.wrap import Wrapper
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import key_for
from torchtpu_cache_core.testing.latency import LatencyStore

LATE_SECONDS = 0.5
COMPILE_SECONDS = 1.0


@pytest.fixture(params=[Tier.DISK, Tier.REMOTE])
def slow(request: pytest.FixtureRequest) -> Tier:
    """The tier that is slow."""
    return Tier(request.param)


def slow_node(inner: Store, slow: Tier) -> tuple[Node, ManualClock]:
    clock = ManualClock()
    store = LatencyStore(inner, seconds=LATE_SECONDS, sleep=clock.advance)
    return Node(resolver=RawResolver(), clock=clock, **{str(slow): ReadOnly(store)}), clock


class ReadOnly(Wrapper):
    """Takes nothing, at once: what a write costs is no matter here."""

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        raise StoreRefused("made read-only", FailureKind.READ_ONLY)


def filled(programs: int) -> MemoryStore:
    remote = MemoryStore(limit_bytes=1 << 24)
    publisher = Node(resolver=RawResolver(), disk=remote)
    for number in range(programs):
        publisher.get_or_compile(request(b"%d" % number), FakeCompiler(seconds=COMPILE_SECONDS))
    return remote


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_slow_tier_costs_in_vain_is_bounded(slow: Tier, fails: bool) -> None:
    inner = FailingStore(StoreUnavailable("made to fail")) if fails else MemoryStore(limit_bytes=1 << 24)
    node, clock = slow_node(inner, slow)
    compiler, programs, started = FakeCompiler(seconds=COMPILE_SECONDS), 50, clock.monotonic()
    for number in range(programs):
        node.get_or_compile(request(b"%d" % number), compiler)
    added = clock.monotonic() - started
    assert added <= CREDIT_SECONDS + SHARE * programs * COMPILE_SECONDS + LATE_SECONDS
    totals = node.counters.snapshot()
    asked = totals["failures"][f"{slow}.io"] if fails else totals["tier_misses"][slow]
    assert added == pytest.approx(asked * LATE_SECONDS)
    assert totals["skipped"] == {f"{slow}.slow": programs - asked}


def test_hits_of_a_slow_tier_are_used_while_they_save_more_than_they_cost(slow: Tier) -> None:
    programs = 50
    node, _ = slow_node(filled(programs), slow)
    tiers = [node.get_or_compile(request(b"%d" % i), FakeCompiler(seconds=COMPILE_SECONDS)).tier for i in range(50)]
    assert tiers == [slow] * programs


class BusyDisk(MemoryStore):
    """Keeps the thread that writes behind its callers' backs until `release`; a caller that writes itself waits."""

    def __init__(self, clock: ManualClock, seconds: float) -> None:
        super().__init__(limit_bytes=1 << 24)
        self._moved = clock
        self._seconds = seconds
        self.busy, self.release = threading.Event(), threading.Event()

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        if threading.current_thread().name == "torchtpu-cache-later":
            self.busy.set()
            assert self.release.wait(30)
        else:
            self._moved.advance(self._seconds)
        return super().put(entry, attestation)


def compiled_over(disk: BusyDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> Node:
    """A node that has compiled eight programs, of which no more than two may wait for the disk."""
    monkeypatch.setattr(later, "_MAX_WAITING_BYTES", 1 << 20)
    node = Node(resolver=RawResolver(), memory=MemoryStore(limit_bytes=1 << 24), disk=disk, clock=clock)
    compiler = FakeCompiler(seconds=1.0, size=400_000)
    try:
        for number in range(8):
            node.get_or_compile(request(b"%d" % number), compiler)
            assert disk.busy.wait(30)
    finally:
        disk.release.set()
        node.close()
    return node


def test_a_disk_too_slow_for_what_waits_is_passed_by_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes have a thread of their own; where that is far behind, a caller waits for two seconds of them at most."""
    clock = ManualClock()
    before = clock.monotonic()
    node = compiled_over(BusyDisk(clock, 5.0), clock, monkeypatch)
    assert clock.monotonic() - before == pytest.approx(5.0)  # one was waited for, which overdrew
    assert node.counters.snapshot()["skipped"]["disk.busy"] >= 1
    assert node.counters.snapshot()["not_published"]["disk_slow"] >= 1


def test_the_time_of_packing_is_not_charged_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, build = ManualClock(), Entry.build

    def slow_build(*parts: Any, **named: Any) -> Entry:
        clock.advance(5.0)
        return build(*parts, **named)

    monkeypatch.setattr(Entry, "build", slow_build)
    node = compiled_over(BusyDisk(clock, 0.0), clock, monkeypatch)
    assert node.counters.snapshot()["skipped"] == {}
    assert node.counters.snapshot()["not_published"] == {}


def test_a_body_that_stops_costs_no_more_than_an_answer() -> None:
    with (
        RawServer(body_stops()) as server,
        RemoteStore(server.url, DEFAULT_NAMESPACE, connect_seconds=2.0, answer_seconds=0.3, idle_seconds=30.0) as store,
    ):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.get(key_for("any"))
        assert caught.value.kind is FailureKind.TIMEOUT
        assert time.monotonic() - started < 5.0
