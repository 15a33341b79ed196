"""The contract of every bucket: named objects that are created once and never change.

Obligations:

- **Create is conditional and atomic**: a reader sees no object or the whole of it; of many creates of one name exactly
  one is told that it won. A created object is durable when `create` returns.
- A miss is a value (`None`, `False`), a failure raises a `StoreError`.
- What is open stays readable after a delete.
- `list` never yields what is not an object (files of others, half-written ones), and may miss what changes meanwhile.
- A bucket never touches what it did not write.
- All methods may be called from any thread.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torchtpu_cache_core.closing import Closing
from torchtpu_cache_server.blobs.layout import ObjectName


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketCapabilities:
    """What a bucket can do.

    Args:
        name: its word in messages and metrics (`files`).
        exclusive: only this process writes here, and no link to an object was given away, so that an object which
            no manifest names may go at once instead of after a day.
        presigns: `url` may answer with a link.
    """

    name: str
    exclusive: bool = False
    presigns: bool = False


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    name: ObjectName
    size_bytes: int
    modified_seconds: float


@dataclass(frozen=True, slots=True)
class Space:
    """Of a disk that others may fill as well."""

    total_bytes: int
    free_bytes: int


class OpenObject(Closing, abc.ABC):
    """An object open for reading.

    Attributes:
        size_bytes: its length, constant.
        identity: equal for two opens only if the content cannot have changed between them.
        descriptor: of the local file that the object is, for reads that must not block; None where it is none.
        sent_at: when the whole of it was last sent, by the clock of the event loop that sends it.
    """

    size_bytes: int
    identity: Hashable
    descriptor: int | None = None
    sent_at: float = float("-inf")

    @abc.abstractmethod
    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Up to `size_bytes` from `offset`; fewer only at the end. StoreError if it cannot be read."""

    @abc.abstractmethod
    def is_unchanged(self) -> bool:
        """Whether another open of the same name would now find this very object, with this identity.

        StoreError if that cannot be said. It does not wait for more than a look into the kernel's memory.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closing twice is harmless."""


class Staged(abc.ABC):
    """Bytes on their way to an object; invisible until `Bucket.create`. One thread at a time."""

    name: ObjectName

    @abc.abstractmethod
    def write(self, data: bytes | memoryview) -> None:
        """Appends. StoreError as in `Bucket.create`."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Gives the space back; a created object stays. To be called at the end in every case; twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


class Bucket(abc.ABC):
    """Objects under names. The module's docstring is the contract."""

    @property
    @abc.abstractmethod
    def capabilities(self) -> BucketCapabilities:
        """Constant for the life of the bucket."""

    @abc.abstractmethod
    def stage(self, name: ObjectName) -> Staged:
        """Begins an object. StoreError as in `create`."""

    @abc.abstractmethod
    def create(self, staged: Staged) -> bool:
        """Makes what was staged the object; False if the name is taken. May be called again, until `discard`.

        Raises:
            StoreFull: no room.
            StoreError: anything else; nothing is visible.
        """

    @abc.abstractmethod
    def open(self, name: ObjectName) -> OpenObject | None:
        """The object for reading, or None. StoreError if the bucket cannot say."""

    @abc.abstractmethod
    def url(self, name: ObjectName, lifetime_seconds: float) -> str | None:
        """A link by which a client may read the object without us, or None where it must be streamed."""

    @abc.abstractmethod
    def head(self, name: ObjectName) -> ObjectInfo | None:
        """What is known of an object without reading it, or None."""

    @abc.abstractmethod
    def refresh(self, name: ObjectName) -> bool:
        """Makes an object as young as if it were just created; False if there is none."""

    @abc.abstractmethod
    def delete(self, name: ObjectName) -> bool:
        """Removes an object; False if there was none."""

    @abc.abstractmethod
    def set_aside(self, name: ObjectName) -> bool:
        """Frees the name of a bad object, and keeps a bounded number of them for a person to look at."""

    @abc.abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose names begin with `prefix`, which ends with a slash; in no particular order."""

    @abc.abstractmethod
    def space(self) -> Space | None:
        """The room of the disk below, or None where there is no bound that matters."""

    @abc.abstractmethod
    def collect_leftovers(self, before_seconds: float) -> int:
        """Removes what writers that died before then left half-written; gives how many."""

    @abc.abstractmethod
    def probe(self) -> None:
        """Writes, reads back and deletes an object, and proves that a second create fails.

        Raises:
            StoreError: the bucket is not usable as it is.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what the bucket holds; closing twice is harmless."""

    @abc.abstractmethod
    def keep_room(self) -> None:
        """Keeps a little room back where others could fill the disk below. Never raises, and may be called often."""

    @abc.abstractmethod
    def make_way(self) -> None:
        """Called before an object goes: gives up what was kept back where there is no room to note it. Never raises."""

    def create_bytes(self, name: ObjectName, data: bytes) -> bool:
        """`stage` and `create` of a small object in one."""
        with self.stage(name) as staged:
            staged.write(data)
            return self.create(staged)

    def read(self, name: ObjectName, limit_bytes: int) -> bytes | None:
        """The first `limit_bytes` of an object, or None if there is none."""
        found = self.open(name)
        if found is None:
            return None
        with found:
            return found.read_at(0, limit_bytes)
