"""The real service for the time of a block, and its data folder as a test may read and damage it."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from support.served import Served, launch
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key, Namespace


def start_service(data_dir: Path, *options: str, listen: str = "127.0.0.1:0") -> Served:
    """Starts the service, with a log of this start beside its folder; RuntimeError as `launch`."""
    log = data_dir.with_name(data_dir.name + ".log")
    log.unlink(missing_ok=True)
    return launch(data_dir, *options, listen=listen, log=log)


@contextlib.contextmanager
def running_service(data_dir: Path, *options: str, listen: str = "127.0.0.1:0") -> Iterator[Served]:
    """The service for the time of the block; ended if the block has not ended it."""
    service = start_service(data_dir, *options, listen=listen)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()
        else:
            service.kill()


def open_remote(url: str, namespace: str) -> RemoteStore:
    """For the workers of the contract suite, which pass strings."""
    return RemoteStore(url, Namespace(namespace), connect_seconds=5.0, answer_seconds=30.0)


class ServiceData:
    """The data folder of a service, past the service (docs/http.md tells its layout).

    What is written goes to a new file that replaces the old one, as another program's would.
    """

    def __init__(self, data_dir: Path) -> None:
        self._root = data_dir

    def read(self, namespace: Namespace, key: Key) -> bytes | None:
        """The bytes of the blob that the key's open manifest names."""
        manifest = self._manifest(namespace, key)
        return None if manifest is None else self._blob(manifest.digest).read_bytes()

    def write(self, namespace: Namespace, key: Key, data: bytes) -> None:
        """Damages the key's blob; where the key has none, plants a manifest with a blob of these bytes."""
        manifest = self._manifest(namespace, key)
        if manifest is not None:
            self._replace(self._blob(manifest.digest), data)
            return
        digest = Digest(hashlib.sha256(data).hexdigest())
        planted = Manifest(
            namespace=namespace,
            key=key,
            generation=self._last_generation(namespace, key) + 1,
            digest=digest,
            size_bytes=max(1, len(data)),
            writer="local",
            created_seconds=time.time(),
        )
        self._replace(self._blob(digest), data)
        self._replace(self._folder(namespace, key) / str(planted.generation), planted.to_bytes())

    def names(self, namespace: Namespace) -> list[str]:
        """Every manifest, tombstone and leftover of a namespace, and every file among the blobs."""
        folders = (self._root / "entries" / namespace, self._root / "blobs")
        return sorted(str(p.relative_to(self._root)) for f in folders for p in f.rglob("*") if not p.is_dir())

    def _folder(self, namespace: Namespace, key: Key) -> Path:
        return self._root / "entries" / namespace / key

    def _blob(self, digest: Digest) -> Path:
        return self._root / "blobs" / "sha256" / digest[:2] / digest

    def _numbers(self, namespace: Namespace, key: Key) -> list[tuple[int, bool]]:
        """Generations, and whether each is a tombstone."""
        folder = self._folder(namespace, key)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [(int(n.removesuffix(".dead")), n.endswith(".dead")) for n in names if n.removesuffix(".dead").isdigit()]

    def _last_generation(self, namespace: Namespace, key: Key) -> int:
        return max((number for number, _ in self._numbers(namespace, key)), default=0)

    def _manifest(self, namespace: Namespace, key: Key) -> Manifest | None:
        numbers = self._numbers(namespace, key)
        closed = max((number for number, dead in numbers if dead), default=0)
        number = max((number for number, dead in numbers if not dead), default=0)
        if number <= closed:
            return None
        return Manifest.from_bytes((self._folder(namespace, key) / str(number)).read_bytes())

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name("written by a test")
        written.write_bytes(data)
        written.replace(path)
