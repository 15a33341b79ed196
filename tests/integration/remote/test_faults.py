"""The remote tier against the real service, with one thing going wrong at a time in between."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faultproxy import Fault, FaultProxy
from support.served import Served
from support.service import running_service, start_service
from torchtpu_cache.breaker import BreakerOpen, BreakerSettings, BreakerStore
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core import wire
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
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.testing.entries import entry_for

MB = 1_000_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running_service(tmp_path_factory.mktemp("service") / "data") as service:
        yield service


@pytest.fixture
def proxy(service: Served) -> Iterator[FaultProxy]:
    with FaultProxy(service.port) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: FaultProxy) -> Iterator[RemoteStore]:
    with RemoteStore(proxy.url, DEFAULT_NAMESPACE, connect_seconds=2.0, answer_seconds=2.0, idle_seconds=2.0) as store:
        yield store


@pytest.fixture
def hasty(proxy: FaultProxy) -> Iterator[RemoteStore]:
    with RemoteStore(proxy.url, DEFAULT_NAMESPACE, answer_seconds=0.3, idle_seconds=0.3) as store:
        yield store


@pytest.fixture(scope="module")
def stored(service: Served) -> Entry:
    """An entry that the service has."""
    entry = entry_for("stored", size_bytes=300_000)
    with RemoteStore(service.url, DEFAULT_NAMESPACE, answer_seconds=10.0) as store:
        store.put(entry)
    return entry


# ---- A16: each class of failure, never a miss ------------------------------------------------------------------

PROXY_PAGE = b"<html><h1>The page that every proxy has</h1></html>"

FAULTS: dict[str, tuple[Fault, type[StoreError], FailureKind]] = {
    "foreign 404": (Fault(status=404), StoreRefused, FailureKind.PROTOCOL),
    "401": (Fault(status=401), StoreRefused, FailureKind.UNAUTHORIZED),
    "403": (Fault(status=403), StoreRefused, FailureKind.FORBIDDEN),
    "429": (Fault(status=429, retry_after="3"), StoreUnavailable, FailureKind.THROTTLED),
    "500": (Fault(status=500), StoreUnavailable, FailureKind.SERVER_ERROR),
    "502": (Fault(status=502), StoreUnavailable, FailureKind.SERVER_ERROR),
    "503": (Fault(status=503), StoreUnavailable, FailureKind.THROTTLED),
    "507": (Fault(status=507), StoreFull, FailureKind.FULL),
    "redirect": (Fault(status=302), StoreRefused, FailureKind.PROTOCOL),
    "login page": (Fault(status=200, body=PROXY_PAGE), StoreRefused, FailureKind.PROTOCOL),
    "timeout": (Fault(hang=True), StoreUnavailable, FailureKind.TIMEOUT),
    "too slow": (Fault(delay_seconds=1.0), StoreUnavailable, FailureKind.TIMEOUT),
    "drip": (Fault(drip_seconds=0.05), StoreUnavailable, FailureKind.TIMEOUT),
    "reset at once": (Fault(reset_at=0), StoreUnavailable, FailureKind.RESET),
    "reset in the head": (Fault(reset_at=40), StoreUnavailable, FailureKind.RESET),
    "closed in the head": (Fault(cut_at=40), StoreUnavailable, FailureKind.RESET),
    "garbage": (Fault(garbage=b"\x16\x03\x01 who are you\n"), StoreRefused, FailureKind.PROTOCOL),
}

ONLY_READS: dict[str, tuple[Fault, type[StoreError], FailureKind]] = {
    "closed in the body": (Fault(cut_at=100_000), StoreUnavailable, FailureKind.RESET),
    "reset in the body": (Fault(reset_at=100_000), StoreUnavailable, FailureKind.RESET),
    "flipped bit in the magic": (Fault(flip_at=0), CorruptEntry, FailureKind.CORRUPT),
    "flipped bit in the header": (Fault(flip_at=100), CorruptEntry, FailureKind.CORRUPT),
    "flipped bit in the payload": (Fault(flip_at=200_000), CorruptEntry, FailureKind.CORRUPT),
    "flipped bit in the trailer": (Fault(flip_at=-1), CorruptEntry, FailureKind.CORRUPT),
    "another ETag": (Fault(headers={"etag": f'"{"0" * 64}"'}), CorruptEntry, FailureKind.CORRUPT),
    "no ETag": (Fault(headers={"etag": None}), CorruptEntry, FailureKind.CORRUPT),
    "no manifest": (Fault(headers={wire.MANIFEST_HEADER.lower(): None}), StoreRefused, FailureKind.PROTOCOL),
    "gzip": (Fault(headers={"content-encoding": "gzip"}), StoreRefused, FailureKind.PROTOCOL),
}


@pytest.mark.parametrize("name", FAULTS | ONLY_READS)
def test_a_failed_get_is_never_a_miss(hasty: RemoteStore, proxy: FaultProxy, stored: Entry, name: str) -> None:
    fault, error, kind = (FAULTS | ONLY_READS)[name]
    proxy.fault = fault
    started = time.monotonic()
    with pytest.raises(error) as caught:
        hasty.get(stored.key)
    assert caught.value.kind is kind
    assert time.monotonic() - started < 1.5
    proxy.fault = None
    found = hasty.get(stored.key)
    assert found is not None
    assert found.entry.digest == stored.digest


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_put_is_no_success(hasty: RemoteStore, proxy: FaultProxy, name: str) -> None:
    fault, error, kind = FAULTS[name]
    entry = entry_for(f"put in vain: {name}")
    proxy.fault = fault
    with pytest.raises(error) as caught:
        hasty.put(entry)
    assert caught.value.kind is kind
    proxy.fault = None
    # Where the service did the work before its answer was lost, the second put finds the same entry.
    assert hasty.put(entry).status in (PutStatus.CREATED, PutStatus.SAME)
    found = hasty.get(entry.key)
    assert found is not None
    assert found.entry.digest == entry.digest


@pytest.mark.parametrize("at", [0, 100, 10_000, -1])
def test_an_upload_that_arrives_damaged_is_not_published(store: RemoteStore, proxy: FaultProxy, at: int) -> None:
    entry = entry_for(f"damaged at {at}", size_bytes=20_000)
    proxy.fault = Fault(methods=frozenset({"PUT"}), flip_request_at=at)
    with pytest.raises(CorruptEntry):
        store.put(entry)
    assert store.get(entry.key) is None
    proxy.fault = None
    assert store.put(entry).status is PutStatus.CREATED


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_look_up_is_no_answer(hasty: RemoteStore, proxy: FaultProxy, stored: Entry, name: str) -> None:
    fault, error, kind = FAULTS[name]
    proxy.fault = fault
    for call in (lambda: hasty.lookup([stored.key]), lambda: list(hasty.iterate()), hasty.stats, hasty.ping):
        with pytest.raises(error) as caught:
            call()
        assert caught.value.kind is kind
    proxy.fault = None
    assert hasty.lookup([stored.key])[stored.key].digest == stored.digest


def test_answers_that_are_swapped_between_keys_are_caught(store: RemoteStore, proxy: FaultProxy, stored: Entry) -> None:
    other = entry_for("another stored one")
    store.put(other)
    paths = {
        wire.entry_path(DEFAULT_NAMESPACE, a.key): wire.entry_path(DEFAULT_NAMESPACE, b.key)
        for a, b in ((stored, other), (other, stored))
    }
    proxy.fault = Fault(methods=frozenset({"GET"}), paths=paths)
    for entry in (stored, other):
        with pytest.raises(CorruptEntry) as caught:
            store.get(entry.key)
        assert caught.value.reason is CorruptReason.KEY


def test_a_true_miss_is_a_miss(store: RemoteStore) -> None:
    absent = entry_for("never put")
    assert store.get(absent.key) is None
    assert store.contains(absent.key) is False
    assert store.lookup([absent.key]) == {}
    assert store.delete(absent.key) is False


# ---- A12: over a size limit ------------------------------------------------------------------------------------

SIZES = [900_000, 1_000_000, 1_100_000, 5_000_000]


def bodies(proxy: FaultProxy, size_bytes: int) -> list[int]:
    return [body for method, _, body in proxy.requests if method == "PUT" and body >= size_bytes]


def sized(name: str, size_bytes: int, compressible: bool) -> Entry:
    """An entry whose executable has this size."""
    executable = (b"%020d" % 0) * (size_bytes // 20) if compressible else None
    return entry_for(f"{name} {size_bytes}", size_bytes=size_bytes, executable=executable)


def limit_fault(variant: str) -> Fault:
    problem = wire.Problem(413, "Too large", "Over the limit.", "too_large", limit_bytes=MB)
    document = json.dumps(problem.to_json()).encode()
    match variant:
        case "413 before body":
            return Fault(over_bytes=MB, status=413, before_body=True)
        case "413 after body":
            return Fault(over_bytes=MB, status=413)
        case "413 with our limit":
            return Fault(
                over_bytes=MB, status=413, before_body=True, body=document, content_type=wire.PROBLEM_CONTENT_TYPE
            )
        case "reset mid-body":
            return Fault(over_bytes=MB, reset_request_at=300_000)
        case _:
            return Fault(over_bytes=MB, status=507, before_body=True)


@pytest.mark.parametrize("compressible", [False, True])
@pytest.mark.parametrize(
    "variant", ["413 before body", "413 after body", "413 with our limit", "reset mid-body", "507"]
)
def test_an_entry_over_a_limit_of_the_way_is_sent_once(
    store: RemoteStore, proxy: FaultProxy, variant: str, compressible: bool
) -> None:
    proxy.fault = limit_fault(variant)
    rounds = 4
    entries = [sized(f"{variant} {compressible}", size, compressible) for size in SIZES]
    fitting = [entry for entry in entries if entry.size_bytes <= MB]
    large = [entry for entry in entries if entry.size_bytes > MB]
    for _ in range(rounds):
        for entry in fitting:
            assert store.put(entry).status in (PutStatus.CREATED, PutStatus.SAME)
        for entry in large:
            with pytest.raises(StoreError) as caught:
                store.put(entry)
            if variant == "413 with our limit":
                assert isinstance(caught.value, EntryTooLarge)
                assert caught.value.limit_bytes == MB
                assert f"{entry.size_bytes:,}" in str(caught.value)
                assert "1,000,000" in str(caught.value)
    tries = [(method, size) for method, _, size in proxy.requests if method == "PUT"]
    offered = len(tries) - rounds * len(fitting)
    full_bodies = sum(size > MB for _, size in tries)
    if not large:
        assert offered == 0
    elif variant == "507":
        # Room may come at any time: the breaker spaces the offers, and none costs a body.
        assert full_bodies == 0
    elif variant == "reset mid-body":
        assert offered == 2
    else:
        assert offered == 1
        assert full_bodies == (1 if variant == "413 after body" else 0)
    for entry in fitting:
        found = store.get(entry.key)
        assert found is not None
        assert found.entry.digest == entry.digest


def test_the_services_own_limit_is_named(tmp_path: Path) -> None:
    with (
        running_service(tmp_path / "data", "--max-size", "1MB") as small,
        RemoteStore(small.url, DEFAULT_NAMESPACE, connect_seconds=2.0, answer_seconds=5.0) as store,
    ):
        large = entry_for("large", size_bytes=5 * MB)
        for _ in range(2):
            with pytest.raises(EntryTooLarge) as caught:
                store.put(large)
            assert caught.value.limit_bytes is not None
            assert caught.value.limit_bytes <= MB
        assert store.put(entry_for("small", size_bytes=100_000)).status is PutStatus.CREATED


# ---- the breaker before a service that dies and comes back -----------------------------------------------------


def test_a_dead_service_costs_one_bounded_wait_and_is_found_again(
    tmp_path: Path,
) -> None:
    service = start_service(tmp_path / "data")
    settings = BreakerSettings(first_probe_seconds=0.05, longest_probe_seconds=0.2)
    entry = entry_for("through the breaker", size_bytes=50_000)
    try:
        with BreakerStore(RemoteStore(service.url, DEFAULT_NAMESPACE), settings=settings) as store:
            store.put(entry)
            assert store.get(entry.key) is not None
            service.kill()
            started = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                store.get(entry.key)
            assert caught.value.kind is FailureKind.CONNECT
            assert time.monotonic() - started < 0.5
            costs = []
            for _ in range(200):
                started = time.perf_counter()
                with pytest.raises(BreakerOpen):
                    store.get(entry.key)
                costs.append(time.perf_counter() - started)
            assert sorted(costs)[100] < 0.002
            assert store.status.skipped_total == 200

            service = start_service(tmp_path / "data", listen=f"127.0.0.1:{service.port}")
            deadline = time.monotonic() + 20
            while store.status.open and time.monotonic() < deadline:
                time.sleep(0.02)
            found = store.get(entry.key)
            assert found is not None
            assert found.entry.digest == entry.digest
            assert store.status.kind is None
    finally:
        service.kill()


def test_a_service_that_hangs_costs_one_answer_time(proxy: FaultProxy, stored: Entry) -> None:
    proxy.fault = Fault(hang=True)
    remote = RemoteStore(proxy.url, DEFAULT_NAMESPACE, answer_seconds=0.2, idle_seconds=0.2)
    with BreakerStore(remote, settings=BreakerSettings(first_probe_seconds=0.05)) as store:
        started = time.monotonic()
        for _ in range(50):
            with pytest.raises(StoreUnavailable):
                store.get(stored.key)
        assert time.monotonic() - started < 0.2 + 0.5
        proxy.fault = None
        deadline = time.monotonic() + 20
        while store.status.open and time.monotonic() < deadline:
            time.sleep(0.02)
        assert store.get(stored.key) is not None


def test_a_service_that_restarts_between_two_calls_is_not_noticed(tmp_path: Path) -> None:
    service = start_service(tmp_path / "data")
    entry = entry_for("over a restart")
    try:
        with RemoteStore(service.url, DEFAULT_NAMESPACE, connect_seconds=2.0, answer_seconds=10.0) as store:
            store.put(entry)
            assert service.stop() == 0
            service = start_service(tmp_path / "data", listen=f"127.0.0.1:{service.port}")
            found = store.get(entry.key)
            assert found is not None
            assert found.entry.digest == entry.digest
    finally:
        service.kill()
