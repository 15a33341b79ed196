"""Decorators of stores. That they keep the contract is shown by tests/contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    FailureKind,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import EntryInfo, PutStatus, Store, Stored, StoreStats
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.stores.wrap import CheckedStore, MeteredStore, ReadOnlyStore, RetryStore, Wrapper
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import corruptions, entry_for
from torchtpu_cache_core.testing.latency import LatencyStore

_ENTRY = entry_for("wrapped")


class Failing(Wrapper):
    """Raises what it was given, one per call, then works."""

    def __init__(self, inner: Store, *errors: StoreError) -> None:
        super().__init__(inner)
        self.errors = list(errors)
        self.calls = 0

    def _fail(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def get(self, key: Key) -> Stored | None:
        self._fail()
        return super().get(key)

    def iterate(self) -> Iterator[EntryInfo]:
        self._fail()
        return super().iterate()

    def stats(self) -> StoreStats:
        self._fail()
        return super().stats()


class Meter:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def observed(self, store: str, operation: str, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.seen.append((store, operation, outcome))


def _memory() -> MemoryStore:
    return MemoryStore(limit_bytes=1 << 30)


def test_read_only_refuses_and_says_so() -> None:
    inner = _memory()
    inner.put(_ENTRY)
    store = ReadOnlyStore(inner)
    assert not store.capabilities.writable
    assert not store.capabilities.deletes
    assert store.get(_ENTRY.key) is not None
    for call in (
        lambda: store.put(entry_for("other")),
        lambda: store.delete(_ENTRY.key),
        lambda: store.set_aside(_ENTRY.key, CorruptReason.PAYLOAD),
    ):
        with pytest.raises(StoreRefused) as caught:
            call()
        assert caught.value.kind is FailureKind.READ_ONLY
    assert inner.stats().entries == 1


def test_retry_asks_again_only_where_it_may_help() -> None:
    pauses: list[float] = []
    flaky = Failing(_memory(), StoreUnavailable("a"), StoreUnavailable("b"))
    assert RetryStore(flaky, sleep=pauses.append).get(_ENTRY.key) is None
    assert flaky.calls == 3
    assert 0.025 <= pauses[0] <= 0.05 <= pauses[1] * 1.0001
    assert pauses[1] <= 0.1
    for error in (StoreRefused("no"), StoreFull("full")):
        firm = Failing(_memory(), error)
        with pytest.raises(type(error)):
            RetryStore(firm, sleep=pauses.append).get(_ENTRY.key)
        assert firm.calls == 1


def test_retry_gives_up_with_the_last_error() -> None:
    dead = Failing(_memory(), *(StoreUnavailable(str(i)) for i in range(9)))
    with pytest.raises(StoreUnavailable, match="3"):
        RetryStore(dead, attempts=4, sleep=lambda _: None).stats()
    assert dead.calls == 4


@pytest.mark.parametrize(("asked", "waited"), [(0.7, 0.7), (60.0, 2.0)])
def test_retry_waits_as_long_as_the_store_asks_within_reason(asked: float, waited: float) -> None:
    pauses: list[float] = []
    busy = Failing(_memory(), StoreUnavailable("busy", FailureKind.THROTTLED, asked))
    RetryStore(busy, sleep=pauses.append).get(_ENTRY.key)
    assert pauses == [waited]


def test_the_meter_never_hears_of_a_failure_as_a_miss() -> None:
    meter = Meter()
    store = MeteredStore(Failing(_memory(), StoreUnavailable("down", FailureKind.RESET)), meter, ManualClock())
    with pytest.raises(StoreUnavailable):
        store.get(_ENTRY.key)
    store.get(_ENTRY.key)
    store.put(_ENTRY)
    store.put(_ENTRY)
    store.get(_ENTRY.key)
    list(store.iterate())
    store.stats()
    store.delete(_ENTRY.key)
    store.contains(_ENTRY.key)
    assert meter.seen == [
        ("memory", operation, outcome)
        for operation, outcome in [
            ("get", "reset"),
            ("get", "miss"),
            ("put", "created"),
            ("put", "same"),
            ("get", "hit"),
            ("iterate", "ok"),
            ("stats", "ok"),
            ("delete", "ok"),
            ("contains", "ok"),
        ]
    ]


def test_latency_comes_before_every_operation() -> None:
    slept: list[float] = []
    store = LatencyStore(_memory(), seconds=0.05, sleep=slept.append)
    calls: list[Callable[[], object]] = [
        lambda: store.get(_ENTRY.key),
        lambda: store.put(_ENTRY),
        lambda: store.contains(_ENTRY.key),
        lambda: list(store.iterate()),
        store.stats,
        lambda: store.delete(_ENTRY.key),
    ]
    for call in calls:
        call()
    assert slept == [0.05] * len(calls)


def test_checked_finds_lies_before_the_caller_does() -> None:
    lying = next(c for c in corruptions(_ENTRY) if c.at_unpack)
    entry = Entry.parse(lying.data)
    inner = _memory()
    store = CheckedStore(inner)
    with pytest.raises(CorruptEntry):
        store.put(entry)
    assert not inner.contains(_ENTRY.key)
    inner.put(entry)
    with pytest.raises(CorruptEntry) as caught:
        store.get(_ENTRY.key)
    assert caught.value.reason is lying.reason
    assert store.get(_ENTRY.key) is None
    assert store.put(_ENTRY).status is PutStatus.CREATED


def test_closing_a_wrapper_closes_what_it_wraps() -> None:
    inner = _memory()
    inner.put(_ENTRY)
    Wrapper(inner).close()
    assert inner.stats().entries == 0
