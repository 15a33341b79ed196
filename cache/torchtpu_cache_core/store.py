"""The contract of every store of entries: memory, disk, the service's files, HTTP.

Obligations (the suite in `torchtpu_cache_core.testing.store_suite` holds each store to them):

- **A miss is a value** (`None`), a failure raises a `StoreError`. An outage is never a miss.
- What `get` returns is whole and checked: magic, version, lengths, digest, and the key asked for. A store that finds
  anything else sets it aside where it can, so that the next put can replace it, and raises `CorruptEntry`.
- `put` publishes all or nothing; a reader sees a miss or the whole entry, never a part. It never overwrites: the
  first entry of a key wins until it is deleted, and the outcome names the winner's digest. Putting the same entry
  again is harmless. An entry that was reported as created is durable as far as `Capabilities.durable` says.
- `delete` of an absent key is not an error.
- `iterate` may miss what changes while it runs; it never raises for what vanished under it, and never lists what is
  not an entry.
- A store may drop entries at any time to keep its limits (`evicts`); it never drops anything that is not its own.
- All methods may be called from any thread. Waiting on one key never delays another.
- After `put` returns, the caller may reuse its buffers. What `get` returned stays valid and unchanged, even after a
  delete or an eviction, until the caller drops it.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.closing import Closing
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptReason
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Digest, Key

CHEAP_COMPILE_SECONDS: Final = 0.01
"""What compiled faster is cheap: it is not worth an upload, an fsync, or its caller's wait for the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do; decorators and the suite read this instead of asking for types.

    Args:
        name: the store's word in counters and messages (`memory`, `disk`, `remote`, `service`).
        writable: `put` and `delete` may succeed.
        durable: what was created survives the death of this process.
        shared: other processes see what was created.
        evicts: entries may vanish to keep limits.
        deletes: `delete` removes for good.
        iterates: `iterate` lists entries.
        keeps_attestation: the attestation given to `put` comes back from `get`.
    """

    name: str
    writable: bool = True
    durable: bool = False
    shared: bool = False
    evicts: bool = False
    deletes: bool = True
    iterates: bool = True
    keeps_attestation: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    """A checked entry as a store gave it, with what the store knows of its origin."""

    entry: Entry
    attestation: Attestation | None = None


class PutStatus(enum.StrEnum):
    """What a put did."""

    CREATED = "created"
    SAME = "same"
    """The very same entry was there already."""
    CONFLICT = "conflict"
    """Another entry of this key was there first, and stays."""


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """What became of a put; `digest` is the one that stands under the key now."""

    status: PutStatus
    digest: Digest
    attestation: Attestation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryInfo:
    """What a listing shows of an entry, from its header and its store, without checking its payload.

    Args:
        accessed_seconds: last use as the store knows it (some write it at most once a minute).
        target_name: what the header's target parts say, for people (`cpu`, `TPU v5 lite x 4`).
        program: the program's name, for people, where a component has one; not sent over the wire.
    """

    key: Key
    size_bytes: int
    executable_bytes: int
    compile_seconds: float
    created_seconds: float
    accessed_seconds: float
    target_name: str
    pinned: bool = False
    program: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """How full a store is. `size_bytes` counts what the limits count: see each store."""

    entries: int
    size_bytes: int
    limit_bytes: int | None = None
    limit_entries: int | None = None


class Store(Closing, abc.ABC):
    """Entries under keys. The module's docstring is the contract."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant for the life of the store."""

    @abc.abstractmethod
    def get(self, key: Key) -> Stored | None:
        """The entry of `key`, or None if there is none.

        Raises:
            CorruptEntry: there was something else under the key; it is set aside.
            StoreError: the store could not answer.
        """

    @abc.abstractmethod
    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """Publishes `entry` under its own key, unless the key has an entry.

        Raises:
            EntryTooLarge: over a limit of this store; asking again cannot help.
            StoreFull: no room could be made.
            StoreError: anything else; nothing is visible and no temporary file is left.
        """

    @abc.abstractmethod
    def contains(self, key: Key) -> bool:
        """Whether `get` would find something, without reading it. StoreError as in `get`."""

    @abc.abstractmethod
    def delete(self, key: Key) -> bool:
        """Removes the entry; True if there was one. StoreError if it could not be removed."""

    def set_aside(self, key: Key, reason: CorruptReason) -> bool:
        """Takes the entry of `key` out of every reader's way, for one who found what only unpacking or loading shows.

        True if there was one and it is gone. A store that keeps none for people deletes it.

        Raises:
            StoreError: it could not be removed.
        """
        return self.delete(key)

    @abc.abstractmethod
    def iterate(self) -> Iterator[EntryInfo]:
        """All entries, in no particular order. StoreError if the store cannot be listed at all."""

    @abc.abstractmethod
    def stats(self) -> StoreStats:
        """How full the store is; cheap, no scan."""

    def close(self) -> None:
        """Gives back what the store holds. No method may be called afterwards; closing twice is harmless."""
