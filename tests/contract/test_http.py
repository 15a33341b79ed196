"""The contract suite over the whole way: RemoteStore, HTTP, and the real service process with its files and index.

Once through a proxy that can break the way, once straight and behind a breaker.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faultproxy import Fault, FaultProxy
from support.served import Served
from support.service import ServiceData, running_service
from torchtpu_cache.breaker import BreakerStore
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.errors import CorruptEntry, FailureKind
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.store import PutStatus, Store
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import Corruption, corruptions, entry_for
from torchtpu_cache_core.testing.store_suite import Limits, StoreSuite
from torchtpu_cache_core.testing.unpickling import no_unpickling
from torchtpu_cache_core.wire import PROBLEM_CONTENT_TYPE, Problem

VICTIM = entry_for("victim")
FAULTS = {
    FailureKind.FULL: Fault(status=507, before_body=True),
    FailureKind.FORBIDDEN: Fault(status=403),
    FailureKind.IO: Fault(
        status=503,
        content_type=PROBLEM_CONTENT_TYPE,
        body=json.dumps(Problem(503, "A title", "The storage did not answer.", "io").to_json()).encode(),
    ),
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running_service(tmp_path_factory.mktemp("service") / "data") as service:
        yield service


class TestHttp(StoreSuite):
    """Each place is a namespace of one service; a place with limits is a service of its own."""

    model_examples = 8

    through_proxy = True

    @pytest.fixture(autouse=True)
    def _services(self, service: Served, tmp_path: Path) -> Iterator[None]:
        self._shared, self._own_folder = service, tmp_path / "own service"
        with contextlib.ExitStack() as self._stack:
            self._proxy = self._stack.enter_context(FaultProxy(service.port)) if self.through_proxy else None
            yield

    def _namespace(self, place: Path) -> Namespace:
        return Namespace("t" + hashlib.sha256(str(place).encode()).hexdigest()[:20])

    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        service = self._shared
        if limits.entries != Limits().entries:
            pytest.skip("capability: the service counts bytes only")
        if limits != Limits():
            running = running_service(self._own_folder, "--max-size", str(limits.bytes))
            service = self._stack.enter_context(running)
        url = self._proxy.url if service is self._shared and self._proxy is not None else service.url
        # Patient, since a slow machine is no fault of the store.
        return RemoteStore(url, self._namespace(place), connect_seconds=5.0, answer_seconds=30.0)

    def raw_read(self, place: Path, key: Key) -> bytes | None:
        return ServiceData(self._shared.data_dir).read(self._namespace(place), key)

    def raw_write(self, place: Path, key: Key, data: bytes) -> None:
        ServiceData(self._shared.data_dir).write(self._namespace(place), key, data)

    def raw_names(self, place: Path) -> list[str]:
        return ServiceData(self._shared.data_dir).names(self._namespace(place))

    @pytest.mark.parametrize("corruption", [c for c in corruptions(VICTIM) if not c.at_unpack], ids=lambda c: c.name)
    def test_corrupt_bytes_are_never_served(self, store: Store, place: Path, corruption: Corruption) -> None:
        """As in the suite, but for the reason: the service tells clients that an entry was damaged, and logs how."""
        self.raw_write(place, VICTIM.key, corruption.data)
        with no_unpickling(), pytest.raises(CorruptEntry) as caught:
            store.get(VICTIM.key)
        assert caught.value.kind is FailureKind.CORRUPT
        assert store.get(VICTIM.key) is None
        assert store.put(VICTIM).status is PutStatus.CREATED
        stored = store.get(VICTIM.key)
        assert stored is not None
        assert stored.entry.digest == VICTIM.digest

    @contextlib.contextmanager
    def broken(self, kind: FailureKind) -> Iterator[None]:
        if self._proxy is None:
            pytest.skip("capability: there is no proxy in between that could fail")
        self._proxy.fault = FAULTS[kind]
        try:
            yield
        finally:
            self._proxy.fault = None

    def opener(self, place: Path) -> tuple[str, list[str]]:
        return "support.service:open_remote", [self._shared.url, self._namespace(place)]


class TestHttpBehindABreaker(TestHttp):
    """A breaker over a store that is well changes nothing."""

    model_examples = 2
    through_proxy = False

    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        return BreakerStore(super().open_store(place, clock, limits))
