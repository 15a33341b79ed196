"""A node over a tier that is right and slow: its cost is bounded, and its hits are used while they pay."""

from __future__ import annotations

import threading
import time

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
from torchtpu_cache_core.stores.wrap import LatencyStore, Wrapper
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import key_for

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
    asked = totals["failures"][f"{slow}.io"] if fails else totals["misses"][slow]
    assert added == pytest.approx(asked * LATE_SECONDS)
    assert totals["skipped"] == {f"{slow}.slow": programs - asked}


def test_hits_of_a_slow_tier_are_used_while_they_save_more_than_they_cost(slow: Tier) -> None:
    programs = 50
    node, _ = slow_node(filled(programs), slow)
    tiers = [node.get_or_compile(request(b"%d" % i), FakeCompiler(seconds=COMPILE_SECONDS)).tier for i in range(50)]
    assert tiers == [slow] * programs


def test_a_disk_too_slow_for_what_waits_is_passed_by_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes have a thread of their own; where that is far behind, a caller waits for two seconds of them at most."""
    monkeypatch.setattr(later, "_MAX_WAITING_BYTES", 1 << 20)
    started, slow_disk = threading.Event(), threading.Event()
    clock = ManualClock()

    class StuckDisk(MemoryStore):
        def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
            if threading.current_thread().name == "torchtpu-cache-later":
                started.set()
                assert slow_disk.wait(30)
            else:
                clock.advance(5.0)
            return super().put(entry, attestation)

    memory, disk = MemoryStore(limit_bytes=1 << 24), StuckDisk(limit_bytes=1 << 24)
    node = Node(resolver=RawResolver(), memory=memory, disk=disk, clock=clock)
    compiler = FakeCompiler(seconds=1.0, size=400_000)
    try:
        before = clock.monotonic()
        for number in range(8):
            node.get_or_compile(request(b"%d" % number), compiler)
            assert started.wait(30)
        assert clock.monotonic() - before == pytest.approx(5.0)  # one was waited for, which overdrew
        assert node.counters.snapshot()["skipped"]["disk.busy"] >= 1
        assert node.counters.snapshot()["not_published"]["disk_slow"] >= 1
    finally:
        slow_disk.set()
        node.close()


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
