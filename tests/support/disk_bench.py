"""A disk store with its clock, its files and a way past it."""

from __future__ import annotations

import os
from pathlib import Path

from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.faults import FaultyFiles


class Bench:
    """A disk store with its clock, its files and a way past it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.clock = ManualClock()
        self.files = FaultyFiles()
        self.layout = Layout(root, DEFAULT_NAMESPACE)

    def open(
        self,
        *,
        limit_bytes: int = 1 << 30,
        limit_entries: int = 10_000,
        min_free_bytes: int = 0,
        machine_key: bytes | None = None,
    ) -> DiskStore:
        return DiskStore(
            self.root,
            DEFAULT_NAMESPACE,
            limit_bytes=limit_bytes,
            limit_entries=limit_entries,
            min_free_bytes=min_free_bytes,
            machine_key=machine_key,
            clock=self.clock,
            files=self.files,
        )

    def path(self, key: Key) -> Path:
        path = self.layout.entry(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def age(self, path: Path, seconds: float) -> None:
        when = self.clock.time() - seconds
        os.utime(path, (when, when), follow_symlinks=False)
