"""The disk store against the contract, bare and through decorators."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import FailureKind
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout
from torchtpu_cache_core.stores.wrap import CheckedStore, MeteredStore, RetryStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles
from torchtpu_cache_core.testing.store_suite import Limits, StoreSuite

_ERRORS = {FailureKind.FULL: errno.ENOSPC, FailureKind.IO: errno.EIO, FailureKind.FORBIDDEN: errno.EACCES}


class TestDisk(StoreSuite):
    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        self.files = FaultyFiles()

    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        return DiskStore(
            place,
            DEFAULT_NAMESPACE,
            limit_bytes=limits.bytes,
            limit_entries=limits.entries,
            min_free_bytes=0,
            clock=clock,
            files=self.files,
        )

    def raw_read(self, place: Path, key: Key) -> bytes | None:
        path = Layout(place, DEFAULT_NAMESPACE).entry(key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, place: Path, key: Key, data: bytes) -> None:
        path = Layout(place, DEFAULT_NAMESPACE).entry(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_names(self, place: Path) -> list[str]:
        return [path.name for path in (place / "entries").rglob("*") if not path.is_dir()]

    def opener(self, place: Path) -> tuple[str, list[str]]:
        return "torchtpu_cache_core.testing.openers:disk", [str(place)]

    def broken(self, kind: FailureKind) -> contextlib.AbstractContextManager[None]:
        return self.files.failing(*(Fault(call=c, error=_ERRORS[kind], within="/entries/") for c in ("read", "write")))


class TestDiskThroughDecorators(TestDisk):
    """Decorators keep the contract of what they wrap."""

    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        return MeteredStore(RetryStore(super().open_store(place, clock, limits), sleep=clock.advance), _Ignored())


class TestCheckedDisk(TestDisk):
    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        return CheckedStore(super().open_store(place, clock, limits))


class _Ignored:
    def observed(self, store: str, operation: str, outcome: str, seconds: float) -> None:
        assert store == "disk"
        assert seconds >= 0
