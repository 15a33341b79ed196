"""A node before a remote that is right and slow: its cost is bounded, and its hits are used while they pay."""

from __future__ import annotations

import time

import pytest

from support.fakes import FailingStore, FakeCompiler, RawResolver, request
from support.peers import body_stops
from support.rawserver import RawServer
from torchtpu_cache.counters import Tier
from torchtpu_cache.gate import CREDIT_SECONDS, SHARE
from torchtpu_cache.node import Node
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.errors import FailureKind, StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.stores.wrap import LatencyStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import key_for

LATE_SECONDS = 0.5
COMPILE_SECONDS = 1.0


def slow_node(inner: Store) -> tuple[Node, ManualClock]:
    clock = ManualClock()
    remote = LatencyStore(inner, seconds=LATE_SECONDS, sleep=clock.advance)
    return Node(resolver=RawResolver(), remote=remote, clock=clock), clock


def filled(programs: int) -> MemoryStore:
    remote = MemoryStore(limit_bytes=1 << 24)
    publisher = Node(resolver=RawResolver(), memory=remote)
    for number in range(programs):
        publisher.get_or_compile(request(b"%d" % number), FakeCompiler(seconds=COMPILE_SECONDS))
    publisher.flush()
    return remote


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_slow_remote_costs_in_vain_is_bounded(fails: bool) -> None:
    inner = FailingStore(StoreUnavailable("made to fail")) if fails else MemoryStore(limit_bytes=1 << 24)
    node, clock = slow_node(inner)
    compiler, programs, started = FakeCompiler(seconds=COMPILE_SECONDS), 50, clock.monotonic()
    for number in range(programs):
        node.get_or_compile(request(b"%d" % number), compiler)
    added = clock.monotonic() - started
    assert added <= CREDIT_SECONDS + SHARE * programs * COMPILE_SECONDS + LATE_SECONDS
    totals = node.counters.snapshot()
    asked = totals["failures"]["remote.io"] if fails else totals["misses"]["remote"]
    assert added == pytest.approx(asked * LATE_SECONDS)
    assert totals["skipped"] == {"remote.slow": programs - asked}


def test_hits_of_a_slow_remote_are_used_while_they_save_more_than_they_cost() -> None:
    programs = 50
    node, _ = slow_node(filled(programs))
    tiers = [node.get_or_compile(request(b"%d" % i), FakeCompiler(seconds=COMPILE_SECONDS)).tier for i in range(50)]
    assert tiers == [Tier.REMOTE] * programs


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
