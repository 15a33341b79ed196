"""Storing behind the caller's back: nobody waits for it, what is not stored yet is found, and forks keep apart."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from support.fakes import FakeCompiler, FakeLoaded, RawResolver, request
from support.forking import succeeds_in_fork
from support.nodes import key_of, memory_store, node, settled
from torchtpu_cache.counters import Tier
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.request import resolve
from torchtpu_cache_core.store import PutOutcome
from torchtpu_cache_core.stores.memory import MemoryStore


class Gated(MemoryStore):
    """Takes no entry before `gate` is set."""

    def __init__(self) -> None:
        super().__init__(limit_bytes=1 << 24)
        self.reached, self.gate = threading.Event(), threading.Event()

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        self.reached.set()
        assert self.gate.wait(30)
        return super().put(entry, attestation)


@pytest.mark.parametrize("seconds", [1.0, 0.001], ids=["worth it", "cheap"])
def test_nobody_waits_for_the_disk_and_what_is_not_there_yet_is_found_here(seconds: float) -> None:
    compiler, disk = FakeCompiler(seconds=seconds), Gated()
    under_test = node(disk=disk)
    compiled = under_test.get_or_compile(request(), compiler)
    again = under_test.get_or_compile(request(), compiler, load=lambda raw: compiler.load(raw, request()))
    assert not disk.contains(key_of())
    assert (compiled.tier, again.tier) == (Tier.COMPILED, Tier.MEMORY)
    assert isinstance(again.loaded, FakeLoaded)
    assert under_test.storing == 1
    disk.gate.set()
    under_test.flush()
    stored = disk.get(key_of())
    assert stored is not None
    assert compiled.digest == again.digest == stored.entry.digest
    assert compiled.entry_bytes == stored.entry.size_bytes
    assert under_test.counters.snapshot()["hits"] == {"memory": 1}
    assert under_test.storing == 0
    totals = under_test.counters.snapshot()
    assert (totals["requests"], totals["missed"]) == (2, 1)


def test_nobody_waits_for_the_disk_after_a_hit_of_the_remote() -> None:
    compiler, disk, remote = FakeCompiler(), Gated(), memory_store()
    settled(node(memory=remote), request(), compiler)
    under_test = node(disk=disk, remote=remote)
    assert under_test.get_or_compile(request(), compiler).tier is Tier.REMOTE
    assert not disk.contains(key_of())
    disk.gate.set()
    under_test.flush()
    assert disk.contains(key_of())


def test_a_node_without_memory_stores_before_it_returns() -> None:
    disk, far = memory_store(), memory_store()
    node(memory=None, disk=disk).get_or_compile(request(), FakeCompiler())
    assert disk.contains(key_of())
    assert node(memory=None, disk=far, remote=disk).get_or_compile(request(), FakeCompiler()).tier is Tier.REMOTE
    assert far.contains(key_of())


def test_what_waits_to_be_stored_answers_its_own_request_only() -> None:
    disk = Gated()
    under_test = node(disk=disk)
    keyed, compiled = resolve(request(), RawResolver()), FakeCompiler().compile(request())
    under_test.publish(keyed, compiled)
    other = replace(keyed, components=resolve(request(b"other"), RawResolver()).components)
    assert under_test.find(keyed) is not None
    assert under_test.find(other) is None, "a foreign key alone proves nothing"
    disk.gate.set()
    under_test.flush()


def test_what_does_not_load_before_it_is_stored_is_not_stored() -> None:
    disk, compiler = Gated(), FakeCompiler()
    under_test = node(disk=disk)
    settled_first = resolve(request(b"in the way"), RawResolver())
    under_test.publish(settled_first, compiler.compile(request(b"in the way")))  # the thread waits at the disk
    keyed = resolve(request(), RawResolver())
    bad = replace(compiler.compile(request()), executable=b"does not load")
    compiler.bad_loads.add(b"does not load")
    under_test.publish(keyed, bad)
    assert under_test.find(keyed, load=lambda raw: compiler.load(raw, request())) is None
    disk.gate.set()
    under_test.flush()
    assert disk.contains(settled_first.key)
    assert not disk.contains(keyed.key)
    assert under_test.counters.snapshot()["failures"] == {"memory.load": 1}


# A fork of a threaded process is what is tried here.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_keep_what_its_parent_stores() -> None:
    memory = Gated()
    under_test = node(memory=memory)
    keyed = resolve(request(), RawResolver())
    under_test.publish(keyed, FakeCompiler().compile(request()))
    assert memory.reached.wait(30)

    def child() -> None:
        memory.gate = threading.Event()  # a thread that is not here may hold the lock of the other
        memory.gate.set()
        assert under_test.find(keyed) is None
        assert under_test.get_or_compile(request(), FakeCompiler()).tier is Tier.COMPILED
        assert under_test.flush()
        assert memory.contains(keyed.key)

    assert succeeds_in_fork(child)
    assert under_test.find(keyed) is not None
    memory.gate.set()
    under_test.flush()


def test_what_cannot_be_packed_is_used_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtpu_cache_core.entry.MAX_EXECUTABLE_BYTES", 10)
    under_test = node()
    result = settled(under_test, request(), FakeCompiler())
    assert (result.tier, result.digest, result.entry_bytes) == (Tier.COMPILED, None, 0)
    assert under_test.counters.snapshot()["not_published"] == {"unpackable": 1}
    assert under_test.storing == 0


def test_an_end_in_order_stores_what_waits() -> None:
    disk = memory_store()
    disk.close = lambda: None  # type: ignore[method-assign]
    under_test = node(disk=disk)
    for number in range(20):
        under_test.get_or_compile(request(b"%d" % number), FakeCompiler(seconds=0.001 if number % 2 else 1.0))
    under_test.close()
    assert disk.stats().entries == 20
