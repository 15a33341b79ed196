"""The contract of every index: what is known of each open entry without asking the bucket.

An index is a cache of the bucket and can be rebuilt from it:

- A miss is never authoritative: the bucket is asked.
- While `complete` is false, nothing that it says is: a rebuild or reconciliation is under way.
- It holds one record per (namespace, key), the open generation's.

Priorities are GreedyDual: an entry is worth the compile seconds that a byte of it saves, on top of the inflation, which
is the priority of the last victim. What is used or recorded rises above what was long unused.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.entry import Header
from torchtpu_cache_core.errors import StoreUnavailable
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key, KeyPrefix, Namespace
from torchtpu_cache_core.store import EntryInfo
from torchtpu_cache_core.stores.listing import target_name
from torchtpu_cache_core.stores.reading import BLOCK_BYTES, rounded_bytes

EntryName = tuple[Namespace, Key]

MAX_WORTH_SECONDS: Final = 86_400.0
"""What a writer claims beyond a day of compiling buys no longer stay."""


class IndexCorrupt(StoreUnavailable):
    """The index's own storage is damaged; `reset` makes it empty and usable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is kept of an open entry: its manifest, and what a listing shows of its header."""

    manifest: Manifest
    executable_bytes: int
    compile_seconds: float
    created_seconds: float
    accessed_seconds: float
    target_name: str
    pinned: bool = False

    @classmethod
    def of(cls, manifest: Manifest, header: Header, accessed_seconds: float) -> Record:
        return cls(
            manifest=manifest,
            executable_bytes=header.executable_bytes,
            compile_seconds=header.compile_seconds,
            created_seconds=header.created_seconds,
            accessed_seconds=accessed_seconds,
            target_name=target_name(header.components),
        )

    @property
    def name(self) -> EntryName:
        return self.manifest.namespace, self.manifest.key

    @property
    def charged_bytes(self) -> int:
        return charged_bytes(self.manifest.size_bytes)

    def info(self) -> EntryInfo:
        return EntryInfo(
            key=self.manifest.key,
            size_bytes=self.manifest.size_bytes,
            executable_bytes=self.executable_bytes,
            compile_seconds=self.compile_seconds,
            created_seconds=self.created_seconds,
            accessed_seconds=self.accessed_seconds,
            target_name=self.target_name,
            pinned=self.pinned,
        )


def charged_bytes(size_bytes: int) -> int:
    """What an entry counts for in the limits: its blob in whole blocks, and a block for its manifest.

    A blob that two entries share counts for each of them: limits err on the side of room.
    """
    return rounded_bytes(size_bytes) + BLOCK_BYTES


def worth(compile_seconds: float, size_bytes: int) -> float:
    """Compile seconds that a megabyte of an entry saves; finite whatever its writer claimed."""
    return min(compile_seconds, MAX_WORTH_SECONDS) / max(size_bytes, 1) * 1e6


@dataclass(frozen=True, slots=True)
class IndexTotals:
    """`charged_bytes` as in the function of that name."""

    entries: int
    charged_bytes: int


class Index(abc.ABC):
    """Records under (namespace, key). Thread-safe. Every method may raise StoreError, IndexCorrupt among them."""

    @property
    @abc.abstractmethod
    def complete(self) -> bool:
        """Every open entry of the bucket is here, and nothing else; survives a restart only after a clean `close`."""

    @abc.abstractmethod
    def set_complete(self, complete: bool) -> None:
        """Says what `complete` answers from now on; only a `close` keeps it."""

    @abc.abstractmethod
    def lookup(self, namespace: Namespace, key: Key) -> Record | None:
        """The record of a key, or None."""

    @abc.abstractmethod
    def lookup_many(self, namespace: Namespace, keys: Sequence[Key]) -> dict[Key, Record]:
        """Those of the keys that have a record; any number may be asked for."""

    @abc.abstractmethod
    def record(self, record: Record) -> None:
        """Adds or replaces; a pin and the later access time stay."""

    @abc.abstractmethod
    def remove(self, namespace: Namespace, key: Key) -> bool:
        """False if it was not there."""

    @abc.abstractmethod
    def touch(self, accessed: Mapping[EntryName, float]) -> None:
        """Notes uses, in one transaction; unknown names are ignored."""

    @abc.abstractmethod
    def page(
        self,
        namespace: Namespace,
        *,
        after: str = "",
        limit: int,
        prefix: KeyPrefix | None = None,
        target: str | None = None,
    ) -> list[Record]:
        """Records in the order of their keys, those after `after` only."""

    @abc.abstractmethod
    def names(self, after: EntryName | None, limit: int) -> list[EntryName]:
        """Names in order, over all namespaces."""

    @abc.abstractmethod
    def references(self, digest: Digest) -> int:
        """How many records name this blob."""

    @abc.abstractmethod
    def victims(self, limit: int) -> list[Record]:
        """What should be evicted first, never what is pinned."""

    @abc.abstractmethod
    def inflate(self, evicted: Iterable[Record]) -> None:
        """Lifts the inflation to the worth that just had to go; call it before the victims are removed."""

    @abc.abstractmethod
    def totals(self, namespace: Namespace | None = None) -> IndexTotals:
        """Of one namespace (counted now), or of all (kept as a running total)."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Sets the storage aside and starts empty and incomplete."""

    @abc.abstractmethod
    def check(self) -> None:
        """Proves that it can be written and read. StoreError where not."""

    @abc.abstractmethod
    def close(self) -> None:
        """Notes a clean end. Closing twice is harmless."""
