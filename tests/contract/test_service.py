"""The service without HTTP, over files and SQLite, against the contract of stores."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from pathlib import Path

import pytest

from support.faultybucket import FaultyBucketFiles
from torchtpu_cache_core.errors import CorruptEntry, FailureKind
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.faults import Fault
from torchtpu_cache_core.testing.store_suite import Limits as SuiteLimits
from torchtpu_cache_core.testing.store_suite import StoreSuite
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.blobs.layout import blob_name, key_prefix, manifest_name
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.store import ServiceStore
from torchtpu_cache_server.upkeep import reconcile

_ERRORS = {FailureKind.FULL: errno.ENOSPC, FailureKind.IO: errno.EIO, FailureKind.FORBIDDEN: errno.EACCES}


class _OwningStore(ServiceStore):
    """Closes its service, which a service's owner does otherwise."""

    def close(self) -> None:
        self._service.close()


class TestService(StoreSuite):
    model_examples = 15

    @pytest.fixture(autouse=True)
    def _files(self) -> None:
        self.files = FaultyBucketFiles()

    def open_store(self, place: Path, clock: ManualClock, limits: SuiteLimits) -> Store:
        service = Service(
            FileBucket(place, files=self.files),
            SqliteIndex(place / "index.sqlite"),
            limits=Limits(limit_bytes=limits.bytes, limit_entries=limits.entries, min_free_bytes=0),
            clock=clock,
        )
        assert reconcile(service)
        return _OwningStore(service, DEFAULT_NAMESPACE)

    def _standing(self, bucket: FileBucket, key: Key) -> tuple[int, Manifest | None]:
        """The highest generation of a key, and its manifest if it is open and readable."""
        found = sorted(Path(info.name) for info in bucket.list(key_prefix(DEFAULT_NAMESPACE, key)))
        highest = max((int(path.stem) for path in found), default=0)
        if not found or any(path.name == f"{highest}.dead" for path in found):
            return highest, None
        raw = bucket.read(manifest_name(DEFAULT_NAMESPACE, key, highest), 1 << 20)
        with contextlib.suppress(CorruptEntry):
            return highest, Manifest.from_bytes(raw or b"")
        return highest, None

    def raw_read(self, place: Path, key: Key) -> bytes | None:
        bucket = FileBucket(place)
        manifest = self._standing(bucket, key)[1]
        if manifest is None:
            return None
        path = bucket.path(blob_name(manifest.digest))
        return path.read_bytes() if path.exists() else None

    def raw_write(self, place: Path, key: Key, data: bytes) -> None:
        bucket = FileBucket(place)
        highest, manifest = self._standing(bucket, key)
        if manifest is None:
            digest = Digest(hashlib.sha256(data).hexdigest())
            manifest = Manifest(
                namespace=DEFAULT_NAMESPACE,
                key=key,
                generation=highest + 1,
                digest=digest,
                size_bytes=max(1, len(data)),
                writer="hostile",
                created_seconds=0.0,
            )
            assert bucket.create_bytes(manifest_name(DEFAULT_NAMESPACE, key, manifest.generation), manifest.to_bytes())
        path = bucket.path(blob_name(manifest.digest))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def raw_names(self, place: Path) -> list[str]:
        return [
            path.name for folder in ("entries", "blobs") for path in (place / folder).rglob("*") if not path.is_dir()
        ]

    def broken(self, kind: FailureKind) -> contextlib.AbstractContextManager[None]:
        return self.files.failing(*(Fault(call=call, error=_ERRORS[kind]) for call in ("read", "write")))
