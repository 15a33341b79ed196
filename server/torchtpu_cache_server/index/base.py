"""The contract of every index: what is known of each open entry without asking the bucket.

An index is a cache of the bucket and can be rebuilt from it:

- A miss is never authoritative: the bucket is asked.
- While `complete` is false, nothing that it says is: a rebuild or reconciliation is under way.
- It holds one record per (namespace, key), the open generation's.

What goes first is `core.eviction`'s to say, by what each entry counts for in the limits, its last use, and whether that
came after it was published.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtpu_cache_core.errors import StoreUnavailable
from torchtpu_cache_core.eviction import gain, gain_class
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key, KeyPrefix, Namespace
from torchtpu_cache_core.store import EntryInfo
from torchtpu_cache_core.stores.listing import target_name
from torchtpu_cache_core.stores.reading import BLOCK_BYTES, rounded_bytes

EntryName = tuple[Namespace, Key]


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

    def gain_class(self, *, used_again: bool) -> int:
        return gain_class(gain(self.compile_seconds, self.charged_bytes, used_again=used_again))

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
    def victims(self, limit: int, now_seconds: float) -> list[Record]:
        """What should be evicted first, the least worth first, as far as classes of gain tell; never what is pinned."""

    @abc.abstractmethod
    def totals(self, namespace: Namespace | None = None) -> IndexTotals:
        """Of one namespace, or of all. They are kept as entries come and go, and never counted anew."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Sets the storage aside and starts empty and incomplete."""

    @abc.abstractmethod
    def check(self) -> None:
        """Proves that it can be written and read. StoreError where not."""

    @abc.abstractmethod
    def close(self) -> None:
        """Notes a clean end. Closing twice is harmless."""
