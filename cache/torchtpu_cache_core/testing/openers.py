"""Opens stores from strings, for `worker` processes."""

from __future__ import annotations

from pathlib import Path

from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.stores.disk import DiskStore


def disk(root: str, limit_entries: str = "10000", limit_bytes: str = str(1 << 30)) -> Store:
    """A disk store on the default namespace."""
    return DiskStore(
        Path(root),
        DEFAULT_NAMESPACE,
        limit_bytes=int(limit_bytes),
        limit_entries=int(limit_entries),
        min_free_bytes=0,
    )
