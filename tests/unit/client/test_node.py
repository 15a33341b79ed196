"""The node: order of tiers, what is counted, and that no fault of a tier ever costs a compile its result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from support.fakes import FailingStore, FakeCompiler, FakeLoaded, RawResolver, request, target
from support.nodes import key_of, memory_store, node, settled
from support.waiting import rewrite
from torchtpu_cache.compilers.base import Compiled
from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache.node import Node
from torchtpu_cache.spool import Spool
from torchtpu_cache_core.canonical.wire import length_field
from torchtpu_cache_core.config import Mode
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    Bypass,
    CompileError,
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    FailureKind,
    LoadError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.request import FORMAT_JAX, Request, resolve
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.stores.memory import MemoryStore


def test_compiles_once_and_then_answers_from_memory() -> None:
    compiler = FakeCompiler()
    under_test = node()
    first = under_test.get_or_compile(request(), compiler)
    second = under_test.get_or_compile(request(), compiler)
    assert (first.tier, second.tier) == (Tier.COMPILED, Tier.MEMORY)
    assert bytes(first.executable) == bytes(second.executable) == compiler.executable(request())
    assert first.key == second.key == key_of()
    assert first.digest == second.digest is not None
    assert len(compiler.calls) == 1
    assert first.seconds_saved == 0
    assert second.seconds_saved == pytest.approx(1.0, abs=0.5)


def test_a_farther_hit_is_kept_in_every_nearer_tier() -> None:
    compiler = FakeCompiler()
    disk, remote = memory_store(), memory_store()
    node(memory=None, disk=remote).get_or_compile(request(), compiler)
    near = memory_store()
    tiers = [
        settled(node(memory=near, disk=disk, remote=remote), request(), compiler).tier,
        settled(node(memory=near, disk=disk, remote=remote), request(), compiler).tier,
        node(disk=disk, remote=remote).get_or_compile(request(), compiler).tier,
    ]
    assert tiers == [Tier.REMOTE, Tier.MEMORY, Tier.DISK]
    assert len(compiler.calls) == 1


@pytest.mark.parametrize(
    "different",
    [
        request(b"another module"),
        request(environ={"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}),
        request(of=target(compiler="d" * 64)),
        request(of=target(cpu_features="avx2")),
    ],
    ids=["program", "flags", "compiler", "cpu features"],
)
def test_what_changes_the_code_is_compiled_again(different: object) -> None:
    compiler = FakeCompiler()
    under_test = node()
    under_test.get_or_compile(request(), compiler)
    compiler.sha256 = different.target.compiler  # type: ignore[attr-defined]
    result = under_test.get_or_compile(different, compiler, load=lambda raw: compiler.load(raw, different))  # type: ignore[arg-type]
    assert result.tier is Tier.COMPILED


FAILURES: list[tuple[Exception, str]] = [
    (StoreUnavailable("away", FailureKind.CONNECT), "connect"),
    (StoreUnavailable("late", FailureKind.TIMEOUT), "timeout"),
    (StoreRefused("no", FailureKind.FORBIDDEN), "forbidden"),
    (StoreFull("full"), "full"),
    (EntryTooLarge(2, 1), "too_large"),
    (CorruptEntry(CorruptReason.DIGEST), "corrupt"),
    (RuntimeError("a bug"), "internal"),
]


@pytest.mark.parametrize("tier", ["memory", "disk", "remote"])
@pytest.mark.parametrize(("error", "kind"), FAILURES, ids=[kind for _, kind in FAILURES])
def test_a_failing_tier_is_counted_as_a_failure_and_never_as_a_miss(tier: str, error: Exception, kind: str) -> None:
    compiler = FakeCompiler()
    under_test = node(**{"memory": None, tier: FailingStore(error)})
    for _ in range(2):
        result = settled(under_test, request(), compiler)
        assert result.tier is Tier.COMPILED
        assert bytes(result.executable) == compiler.executable(request())
    totals = under_test.counters.snapshot()
    assert totals["tier_misses"] == {}
    assert totals["failures"][f"{tier}.{kind}"] >= 2
    assert totals["compiled"] == 2


class Planted(MemoryStore):
    """Answers with one entry, whatever is asked, until it is deleted."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(limit_bytes=1 << 20)
        self.planted: Entry | None = entry

    def get(self, key: Key):  # type: ignore[no-untyped-def]
        from torchtpu_cache_core.store import Stored

        return super().get(key) if self.planted is None else Stored(self.planted)

    def delete(self, key: Key) -> bool:
        self.planted = None
        return super().delete(key)


def test_an_entry_of_another_request_is_refused_set_aside_and_replaced() -> None:
    compiler = FakeCompiler()
    filled = memory_store()
    settled(node(memory=filled), request(b"other"), compiler)
    stored = filled.get(key_of(b"other"))
    assert stored is not None
    planted = Planted(stored.entry)
    under_test = node(memory=None, disk=planted)
    assert under_test.get_or_compile(request(), compiler).tier is Tier.COMPILED
    assert under_test.get_or_compile(request(), compiler).tier is Tier.DISK
    assert under_test.counters.snapshot()["failures"] == {"disk.corrupt": 1}


def test_a_remote_that_answers_with_another_entry_is_not_believed_and_not_written() -> None:
    compiler = FakeCompiler()
    filled = memory_store()
    settled(node(memory=filled), request(b"other"), compiler)
    stored = filled.get(key_of(b"other"))
    assert stored is not None
    planted = Planted(stored.entry)
    result = node(remote=planted).get_or_compile(request(), compiler, load=lambda raw: compiler.load(raw, request()))
    assert result.tier is Tier.COMPILED
    assert planted.planted is not None, "a client must not delete at the remote"


@pytest.mark.parametrize(
    ("mode", "serves", "stores"),
    [(Mode.ON, True, True), (Mode.OFF, False, False), (Mode.READ, True, False), (Mode.RECORD, False, True)],
)
def test_modes(mode: Mode, serves: bool, stores: bool) -> None:
    compiler = FakeCompiler()
    filled, empty = memory_store(), memory_store()
    settled(node(memory=filled), request(), compiler)
    served = node(memory=filled, mode=mode).get_or_compile(request(), compiler)
    assert (served.tier is Tier.MEMORY) is serves
    settled(node(memory=empty, mode=mode), request(), compiler)
    assert empty.contains(key_of()) is stores


def test_read_mode_keeps_what_the_remote_has_on_this_machine() -> None:
    compiler = FakeCompiler()
    disk, remote = memory_store(), memory_store()
    settled(node(memory=remote), request(), compiler)
    settled(node(disk=disk, remote=remote, mode=Mode.READ), request(), compiler)
    assert disk.contains(key_of())


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(b"callback"), "host_callback"),
        (request(of=target().without_identity("fake", "nobody knows")), "target_unknown"),
    ],
)
def test_a_bypass_compiles_every_time_and_stores_nothing(asked: object, reason: str) -> None:
    compiler = FakeCompiler()
    memory = memory_store()
    under_test = node(memory=memory)
    for _ in range(2):
        result = under_test.get_or_compile(asked, compiler)  # type: ignore[arg-type]
        assert (result.key, result.tier, result.bypassed) == (None, Tier.COMPILED, reason)
    assert len(compiler.calls) == 2
    assert memory.stats().entries == 0
    assert under_test.counters.snapshot()["bypassed"] == {reason: 2}


def test_a_resolver_with_a_bug_costs_the_cache_and_not_the_compile() -> None:
    class Broken:
        def resolve(self, program: bytes) -> object:
            raise RuntimeError("a bug")

    result = Node(resolver=Broken(), memory=memory_store()).get_or_compile(request(), FakeCompiler())  # type: ignore[arg-type]
    assert (result.tier, result.bypassed) == (Tier.COMPILED, "internal")


def test_a_changed_compiler_is_used_and_not_published() -> None:
    compiler = FakeCompiler(sha256="d" * 64)
    memory = memory_store()
    under_test = node(memory=memory)
    assert settled(under_test, request(), compiler).tier is Tier.COMPILED
    assert memory.stats().entries == 0
    assert under_test.counters.snapshot()["not_published"] == {"compiler_changed": 1}


@pytest.mark.parametrize("named_by", ["flag", "option"])
def test_a_flag_file_that_changes_during_the_compile_is_not_published(tmp_path: Path, named_by: str) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1")
    rewrites = iter((["--xla_a=2"], ["--xla_a=3", "--xla_a=2"], []))

    class Slow(FakeCompiler):
        def compile(self, request: Request, *, progress: Callable[[float], None] | None = None) -> Compiled:
            for text in next(rewrites):
                rewrite(flags, text)
            return super().compile(request, progress=progress)

    def asked() -> Request:
        if named_by == "flag":
            return request(environ={"LIBTPU_INIT_ARGS": f"--flagfile={flags}"})
        value = length_field(2, length_field(1, str(flags).encode()))
        return replace(request(), options=length_field(7, length_field(1, b"xla_a_file") + value))

    memory = memory_store()
    under_test, compiler = node(memory=memory), Slow()
    settled(under_test, asked(), compiler)
    settled(under_test, asked(), compiler)  # it ends as it began, but who knows what the compiler saw
    assert memory.stats().entries == 0
    assert under_test.counters.snapshot()["not_published"] == {"environment_changed": 2}
    settled(under_test, asked(), compiler)
    assert memory.stats().entries == 1


def test_a_compile_error_reaches_the_caller_and_is_never_an_answer() -> None:
    compiler = FakeCompiler()
    compiler.fails = [True]
    under_test = node()
    with pytest.raises(CompileError):
        under_test.get_or_compile(request(), compiler)
    assert under_test.get_or_compile(request(), compiler).tier is Tier.COMPILED


def test_eight_threads_cause_one_compile() -> None:
    compiler = FakeCompiler(sleep=0.3)
    under_test = node()
    barrier = threading.Barrier(8)

    def ask() -> Tier:
        barrier.wait()
        return under_test.get_or_compile(request(), compiler, load=lambda raw: compiler.load(raw, request())).tier

    with ThreadPoolExecutor(8) as pool:
        tiers = [future.result() for future in [pool.submit(ask) for _ in range(8)]]
    assert sorted(tiers) == sorted([Tier.COMPILED] + [Tier.MEMORY] * 7)
    assert len(compiler.calls) == 1
    assert compiler.loads == 8
    assert under_test.counters.snapshot()["hits"] == {"memory": 7}


def test_waiting_on_one_key_does_not_delay_another() -> None:
    slow, quick = FakeCompiler(sleep=3.0), FakeCompiler()
    under_test = node()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(under_test.get_or_compile, request(b"slow"), slow)
        while not slow.calls:
            pass
        assert (
            pool.submit(under_test.get_or_compile, request(b"quick"), quick).result(timeout=1.5).tier is Tier.COMPILED
        )
        assert not first.done()


def test_the_waiters_of_a_failed_compile_compile_for_themselves() -> None:
    compiler = FakeCompiler(sleep=0.2)
    compiler.fails = [True]
    under_test = node()
    barrier = threading.Barrier(4)

    def ask() -> object:
        barrier.wait()
        try:
            return under_test.get_or_compile(request(), compiler).tier
        except CompileError:
            return "failed"

    with ThreadPoolExecutor(4) as pool:
        outcomes = [future.result(timeout=30) for future in [pool.submit(ask) for _ in range(4)]]
    assert outcomes.count("failed") == 1


def test_an_entry_that_does_not_load_is_set_aside_and_compiled_again() -> None:
    compiler = FakeCompiler()
    memory = memory_store()
    under_test = node(memory=memory)
    settled(under_test, request(), compiler)
    loads: list[object] = []

    def load(raw: bytes | memoryview) -> object:
        loads.append(raw)
        if len(loads) == 1:
            raise LoadError("made to fail")
        return compiler.load(raw, request())

    result = under_test.get_or_compile(request(), compiler, load=load)  # type: ignore[arg-type]
    assert result.tier is Tier.COMPILED
    totals = under_test.counters.snapshot()
    assert totals["failures"] == {"memory.load": 1}
    assert totals["hits"] == {}
    assert len(compiler.calls) == 2


def test_an_entry_is_kept_where_the_device_was_to_blame() -> None:
    compiler = FakeCompiler()
    memory = memory_store()
    under_test = node(memory=memory)
    settled(under_test, request(), compiler)

    def load(_raw: bytes | memoryview) -> object:
        raise LoadError("out of memory", blames_entry=False)

    with pytest.raises(LoadError):
        under_test.get_or_compile(request(), compiler, load=load)  # type: ignore[arg-type]
    assert memory.contains(key_of())


@pytest.fixture
def spooled(tmp_path: Path) -> Callable[..., tuple[Node, Spool]]:
    def make(remote: Store, **parts: object) -> tuple[Node, Spool]:
        counters = Counters()
        spool = Spool(tmp_path / "spool", remote, counters, limit_bytes=1 << 24)
        return node(remote=remote, spool=spool, counters=counters, **parts), spool

    return make


def test_what_was_compiled_reaches_the_remote(spooled: Callable[..., tuple[Node, Spool]]) -> None:
    remote = memory_store()
    under_test, _ = spooled(remote)
    under_test.get_or_compile(request(), FakeCompiler())
    assert under_test.drain(10) == 0
    assert remote.contains(key_of())
    assert under_test.counters.snapshot()["published"] == {"created": 1}
    under_test.close()


def test_a_cheap_program_stays_on_this_machine(spooled: Callable[..., tuple[Node, Spool]]) -> None:
    remote = memory_store()
    under_test, _ = spooled(remote)
    under_test.get_or_compile(request(), FakeCompiler(seconds=0.001))
    assert under_test.drain(10) == 0
    assert not remote.contains(key_of())
    assert under_test.counters.snapshot()["not_published"] == {"cheap": 1}
    under_test.close()


def test_a_load_in_changed_surroundings_blames_nobody_and_keeps_the_entry() -> None:
    compiler = FakeCompiler()
    memory = memory_store()
    under_test = node(memory=memory)
    settled(under_test, request(), compiler)

    def load(_raw: bytes | memoryview) -> object:
        raise Bypass("environment_changed", "XLA_FLAGS changed")

    with pytest.raises(LoadError, match="XLA_FLAGS changed"):
        under_test.get_or_compile(request(), compiler, load=load)  # type: ignore[arg-type]
    assert memory.contains(key_of())


def test_a_store_that_breaks_in_a_new_way_costs_no_compile(tmp_path: Path) -> None:
    class Broken(Spool):
        def add(self, entry: Entry, *, durable: bool) -> bool:
            raise RuntimeError("can't start new thread")

    counters = Counters()
    spool = Broken(tmp_path / "spool", memory_store(), counters, limit_bytes=1)
    result = settled(node(spool=spool, counters=counters), request(), FakeCompiler())
    assert result.tier is Tier.COMPILED
    assert counters.snapshot()["not_published"] == {"internal": 1}


def test_what_does_not_load_from_disk_is_replaced_by_what_the_remote_has() -> None:
    compiler = FakeCompiler()
    disk, remote = memory_store(), memory_store()
    for store in (disk, remote):
        node(memory=None, disk=store).get_or_compile(request(), compiler)
    loads: list[object] = []

    def load(raw: bytes | memoryview) -> object:
        loads.append(raw)
        if len(loads) == 1:
            raise LoadError("made to fail")
        return compiler.load(raw, request())

    under_test = node(memory=None, disk=disk, remote=remote)
    assert under_test.get_or_compile(request(), compiler, load=load).tier is Tier.REMOTE  # type: ignore[arg-type]
    assert disk.contains(key_of())
    assert len(compiler.calls) == 2, "only the two that filled the tiers"


def test_a_caller_that_compiles_for_itself_finds_what_it_published() -> None:
    compiler = FakeCompiler()
    disk = memory_store()
    under_test = node(memory=None, disk=disk)
    keyed = resolve(request(), RawResolver())
    assert under_test.find(keyed) is None
    compiled = compiler.compile(request())
    under_test.compiled(keyed, compiled.compile_seconds)
    entry = under_test.publish(keyed, compiled)
    assert entry is not None
    found = under_test.find(keyed, load=lambda raw: compiler.load(raw, request()))
    assert found is not None
    assert (found.tier, found.digest, found.executable) == (Tier.DISK, entry.digest, compiled.executable)
    assert isinstance(found.loaded, FakeLoaded)
    totals = under_test.counters.snapshot()
    assert (totals["requests"], totals["compiled"]) == (2, 1)
    assert totals["hits"] == totals["tier_misses"] == {"disk": 1}


def test_what_does_not_load_for_a_caller_that_compiles_for_itself_is_replaced() -> None:
    compiler = FakeCompiler()
    disk = memory_store()
    under_test = node(memory=None, disk=disk)
    keyed = resolve(request(), RawResolver())
    bad = replace(compiler.compile(request()), executable=b"does not load")
    compiler.bad_loads.add(b"does not load")
    under_test.publish(keyed, bad)
    assert under_test.find(keyed, load=lambda raw: compiler.load(raw, request())) is None
    under_test.publish(keyed, compiler.compile(request()))
    assert under_test.find(keyed, load=lambda raw: compiler.load(raw, request())) is not None
    assert under_test.counters.snapshot()["failures"] == {"disk.load": 1}


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.READ, Mode.RECORD])
def test_finding_and_publishing_keep_to_the_mode(mode: Mode) -> None:
    keyed, compiled = resolve(request(), RawResolver()), FakeCompiler().compile(request())
    full, empty = memory_store(), memory_store()
    filling, under_test = node(memory=full), node(memory=empty, mode=mode)
    filling.publish(keyed, compiled)
    filling.flush()
    assert (node(memory=full, mode=mode).find(keyed) is not None) == mode.serves
    assert (under_test.publish(keyed, compiled) is not None) == mode.publishes
    under_test.flush()
    assert empty.contains(keyed.key) == mode.publishes


def test_bytes_that_come_compressed_are_stored_as_they_are() -> None:
    disk = memory_store()
    question = replace(request(), executable_format=FORMAT_JAX)
    keyed = resolve(question, RawResolver())
    compiled = replace(FakeCompiler().compile(question), executable=bytes(4096))
    node(memory=None, disk=disk).publish(keyed, compiled)
    stored = disk.get(keyed.key)
    assert stored is not None
    entry = stored.entry
    assert (entry.header.codec, entry.header.executable_bytes, entry.frame.payload_bytes) == ("raw", 4096, 4096)
    assert bytes(Entry.parse(entry.buffer).executable()) == bytes(4096)


@pytest.mark.parametrize("own", [True, False], ids=["compiled here", "compiled elsewhere"])
def test_what_this_machine_compiled_before_it_had_the_remote_is_published_when_it_is_found(
    spooled: Callable[..., tuple[Node, Spool]], own: bool
) -> None:
    disk, remote, compiler = memory_store(), memory_store(), FakeCompiler()
    settled(node(disk=disk, machine_key=bytes(32)), request(), compiler)
    under_test, _ = spooled(remote, disk=disk, machine_key=bytes(32) if own else bytes(31) + b"x")
    assert under_test.get_or_compile(request(), compiler).tier is Tier.DISK
    assert under_test.drain(10) == 0
    assert remote.contains(key_of()) == own
    under_test.close()
