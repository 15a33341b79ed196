"""Executables of one CPU on another: the host's features are in the key, through every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.fakes import FakeCompiler, RawResolver, request, target
from support.service import running_service
from torchtpu_cache.counters import Tier
from torchtpu_cache.node import Node
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.request import ResolvedRequest, resolve
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.stores.disk import DiskStore

WIDE = "avx2 avx512f"
NARROW = "avx2"

OpenStore = Callable[[], Store]


@pytest.fixture(params=["disk", "remote"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Opens one store as each of several hosts sees it: a shared mount, or the service."""
    if request.param == "disk":
        folder = tmp_path / "shared"
        yield lambda: DiskStore(folder, DEFAULT_NAMESPACE, limit_bytes=1 << 24, limit_entries=1000, min_free_bytes=0)
    else:
        with running_service(tmp_path / "service") as service:
            yield lambda: RemoteStore(service.url, DEFAULT_NAMESPACE)


def asked(features: str) -> ResolvedRequest:
    return resolve(request(of=target(cpu_features=" ".join(sorted(features.split())))), RawResolver())


def run(store: Store, features: str) -> Tier:
    """One start of a job on a host with these features; its loader refuses what was made for another."""
    compiler, each = FakeCompiler(), asked(features)
    with store:
        node = Node(resolver=RawResolver(), disk=store)
        return node.answer(each, compiler, load=lambda executable: compiler.load(executable, each.request)).tier


def test_another_cpu_misses_and_another_order_of_features_hits(shared: OpenStore) -> None:
    assert run(shared(), WIDE) is Tier.COMPILED
    assert run(shared(), NARROW) is Tier.COMPILED
    assert run(shared(), "avx512f avx2") is Tier.DISK
    assert run(shared(), NARROW) is Tier.DISK


def test_an_executable_planted_under_another_hosts_key_never_reaches_its_loader(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    store = DiskStore(folder, DEFAULT_NAMESPACE, limit_bytes=1 << 24, limit_entries=1000, min_free_bytes=0)
    wide, narrow = asked(WIDE), asked(NARROW)
    assert run(store, WIDE) is Tier.COMPILED
    (honest,) = folder.rglob(str(wide.key))
    planted = folder / "entries" / DEFAULT_NAMESPACE / narrow.key.hexdigest[:2] / narrow.key
    planted.parent.mkdir(mode=0o700, exist_ok=True)
    planted.write_bytes(honest.read_bytes())
    compiler = FakeCompiler()
    reopened = DiskStore(folder, DEFAULT_NAMESPACE, limit_bytes=1 << 24, limit_entries=1000, min_free_bytes=0)
    node = Node(resolver=RawResolver(), disk=reopened)
    result = node.answer(narrow, compiler, load=lambda executable: compiler.load(executable, narrow.request))
    assert result.tier is Tier.COMPILED
    assert compiler.loads == 1, "the planted bytes reached the loader"
    assert node.counters.snapshot()["failures"] == {"disk.corrupt": 1}
    stored = reopened.get(narrow.key)
    assert stored is not None
    assert Entry.parse(bytes(stored.entry.buffer)).key == narrow.key
