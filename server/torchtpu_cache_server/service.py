"""The service without HTTP: entries of many namespaces over a bucket and an index, within limits."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.closing import Closing
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, StoreError, StoreUnavailable
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key, KeyPrefix, Namespace
from torchtpu_cache_core.store import PutStatus, StoreStats
from torchtpu_cache_core.wire import Found, Page
from torchtpu_cache_server.admission import Admission, Limits
from torchtpu_cache_server.blobs.bucket import Bucket, OpenObject, Staged
from torchtpu_cache_server.blobs.layout import blob_name
from torchtpu_cache_server.catalog import Catalog
from torchtpu_cache_server.hot import Hot
from torchtpu_cache_server.incoming import Incoming
from torchtpu_cache_server.index.base import EntryName, Index, Record

_log = logging.getLogger(__name__)

_MAX_TOUCHED: Final = 10_000
_MAX_TRIES: Final = 3


class OpenEntry(NamedTuple):
    """An entry open for reading: verified bytes, which stay readable whatever happens to the entry."""

    manifest: Manifest
    blob: OpenObject

    def close(self) -> None:
        """Closing twice is harmless."""
        self.blob.close()


class Service(Closing):
    """Entries by namespace and key. Thread-safe; every method but `open_hot` may block on the disk.

    It owns bucket and index and closes them.

    Args:
        evicted: called for every entry that had to make room.
        condemned: called for every entry whose bytes turned out bad.
    """

    def __init__(
        self,
        bucket: Bucket,
        index: Index,
        *,
        limits: Limits | None = None,
        clock: Clock = SYSTEM_CLOCK,
        evicted: Callable[[], None] = lambda: None,
        condemned: Callable[[], None] = lambda: None,
    ) -> None:
        self.bucket = bucket
        self.index = index
        self.clock = clock
        self.catalog = Catalog(bucket, index, clock=clock)
        self._admission = Admission(limits or Limits(), bucket, index, self._evict, clock=clock)
        self._evicted = evicted
        self._condemned = condemned
        self._hot = Hot()
        self._touched_lock = threading.Lock()  # guards _touched
        self._touched: dict[EntryName, float] = {}

    @property
    def limits(self) -> Limits:
        return self._admission.limits

    def open_hot(self, namespace: Namespace, key: Key) -> OpenEntry | None:
        """As `open`, but only what memory knows and the kernel has at hand; None is no answer."""
        name = namespace, key
        verified = self._hot.get(name)
        if verified is None:
            return None
        blob = verified.shared
        if blob is None:
            opened = self.bucket.open(verified.blob)
            if opened is None:
                return None
            if opened.identity != verified.identity:
                opened.close()
                return None
            blob = self._hot.share(name, verified, opened)
        elif not blob.is_unchanged():
            self._hot.drop(name)
            return None
        self._touch(name)
        return OpenEntry(verified.manifest, blob)

    def attach(self, namespace: Namespace, key: Key, thing: object) -> bool:
        """Keeps a reference to `thing` until the entry is deleted, evicted, or no longer a hot one; False where it is
        none now."""
        return self._hot.attach((namespace, key), thing)

    def open(self, namespace: Namespace, key: Key) -> OpenEntry | None:
        """The entry of a key, open for reading, or None. The caller closes it.

        Raises:
            CorruptEntry: its bytes were bad; it is set aside, so that the next put can replace it.
            StoreError: the bucket could not answer.
        """
        for _ in range(_MAX_TRIES):
            epoch = self._hot.epoch
            record = self.find(namespace, key)
            if record is None:
                return None
            try:
                blob = self._open_verified(record)
            except CorruptEntry as error:
                if self._condemn(record, error):
                    raise
                continue  # it was closed or replaced while we looked
            self._hot.put(record.name, record.manifest, blob.identity, epoch)
            self._touch(record.name)
            return OpenEntry(record.manifest, blob)
        raise StoreUnavailable("the entry changed again and again while it was read")

    def _open_verified(self, record: Record) -> OpenObject:
        blob = self.catalog.blob_of(record.manifest)
        try:
            known = self._hot.get(record.name)
            if known is None or (known.manifest, known.identity) != (record.manifest, blob.identity):
                self.catalog.verify(record, blob)
        except BaseException:
            blob.close()
            raise
        return blob

    def _condemn(self, record: Record, error: CorruptEntry) -> bool:
        try:
            condemned = self.catalog.condemn(record, error)
        finally:
            self._hot.drop(record.name)
        if condemned:
            self._condemned()
        return condemned

    def find(self, namespace: Namespace, key: Key) -> Record | None:
        """What is known of a key, without its bytes. Errors as in `open`."""
        try:
            return self.catalog.find(namespace, key)
        except CorruptEntry:
            self._hot.drop((namespace, key))
            self._condemned()
            raise

    def synchronise(self, namespace: Namespace, key: Key) -> None:
        """Makes the index say of one key what the bucket says; an entry that turns out bad is closed, and counted."""
        try:
            self.catalog.synchronise(namespace, key)
        except CorruptEntry:
            self._hot.drop((namespace, key))
            self._condemned()

    def lookup(self, namespace: Namespace, keys: Sequence[Key]) -> dict[Key, Found]:
        """Those of the keys that have entries. StoreError as in `open`."""
        records: dict[Key, Record] = {}
        if self.index.complete:
            try:
                records = self.index.lookup_many(namespace, keys)
            except StoreError as error:
                self.catalog.doubt_index(error)
        for key in dict.fromkeys(keys):
            with contextlib.suppress(CorruptEntry):  # it is closed now: a miss
                if key not in records and (record := self.find(namespace, key)) is not None:
                    records[key] = record
        return {
            key: Found(record.manifest.digest, record.manifest.size_bytes, record.compile_seconds)
            for key, record in records.items()
        }

    def standing(self, namespace: Namespace, key: Key) -> Manifest | None:
        """The manifest of the entry that a put of this key would meet; bad bytes are set aside first."""
        try:
            if self.find(namespace, key) is None:
                return None
        except CorruptEntry:
            return None
        record = self.catalog.standing(namespace, key)
        if record is None:
            self._hot.drop((namespace, key))
            self._condemned()
            return None
        return record.manifest

    def check_size(self, size_bytes: int) -> None:
        """EntryTooLarge if an entry of that size can never be taken."""
        self._admission.check_size(size_bytes)

    def receive(self, namespace: Namespace, key: Key, digest: Digest, size_bytes: int) -> Incoming:
        """Begins to take in an entry of exactly that digest and size. The caller closes what it gets.

        Raises:
            EntryTooLarge: over a limit.
            StoreFull: no room could be made.
            StoreError: anything else.
        """
        with contextlib.ExitStack() as stack:
            reservation = stack.enter_context(self._admission.reserve(size_bytes))
            staged = stack.enter_context(self.bucket.stage(blob_name(digest)))
            return Incoming(
                key,
                digest,
                size_bytes,
                max_entry_bytes=self.limits.max_entry_bytes,
                reservation=reservation,
                staged=staged,
                publish=lambda header: self._publish(namespace, header, digest, size_bytes, staged),
                held=stack.pop_all(),
            )

    def _publish(
        self, namespace: Namespace, header: Header, digest: Digest, size_bytes: int, staged: Staged
    ) -> tuple[PutStatus, Manifest]:
        status, record = self.catalog.publish(namespace, header, digest, size_bytes, staged)
        self._hot.drop(record.name)
        return status, record.manifest

    def put(self, namespace: Namespace, entry: Entry) -> tuple[PutStatus, Manifest]:
        """Publishes a whole entry. Errors as in `receive` and `Incoming.commit`."""
        self.check_size(entry.size_bytes)
        standing = self.standing(namespace, entry.key)
        if standing is not None:
            return (PutStatus.SAME if standing.digest == entry.digest else PutStatus.CONFLICT), standing
        with self.receive(namespace, entry.key, entry.digest, entry.size_bytes) as incoming:
            incoming.feed(entry.buffer)
            return incoming.commit()

    def delete(self, namespace: Namespace, key: Key) -> bool:
        """Closes the entry of a key for good; False if there was none. StoreError if that failed."""
        try:
            return self.catalog.close(namespace, key, "deleted")
        finally:
            self._hot.drop((namespace, key))

    def page(
        self,
        namespace: Namespace,
        *,
        after: str = "",
        limit: int,
        prefix: KeyPrefix | None = None,
        target: str | None = None,
    ) -> Page:
        """Entries in the order of their keys. While the index is being rebuilt, those that it has so far.

        Args:
            after: the cursor of the page before, or nothing.

        Raises:
            StoreError: the index did not answer.
        """
        self.flush_touches()
        try:
            records = self.index.page(namespace, after=after, limit=limit + 1, prefix=prefix, target=target)
        except StoreError as error:
            self.catalog.doubt_index(error)
            raise
        shown = [record.info() for record in records[:limit]]
        return Page(shown, shown[-1].key if len(records) > limit else None)

    def stats(self, namespace: Namespace | None = None) -> StoreStats:
        """How full one namespace, or all of it, is; the limits are of all."""
        totals = self.index.totals(namespace)
        return StoreStats(
            entries=totals.entries,
            size_bytes=totals.charged_bytes,
            limit_bytes=self.limits.limit_bytes,
            limit_entries=self.limits.limit_entries,
        )

    def check(self) -> None:
        """Proves that bucket and index can be written and read. StoreError where not."""
        self.bucket.probe()
        try:
            self.index.check()
        except StoreError as error:
            self.catalog.doubt_index(error)
            raise

    def flush_touches(self) -> None:
        """Brings the uses since the last call into the index."""
        with self._touched_lock:
            touched, self._touched = self._touched, {}
        if touched:
            try:
                self.index.touch(touched)
            except StoreError as error:
                self.catalog.doubt_index(error)

    def close(self) -> None:
        """Closes bucket and index; nothing may be under way. Closing twice is harmless."""
        with contextlib.suppress(StoreError):
            self.flush_touches()
        self._hot.clear()
        self.index.close()
        self.bucket.close()

    def _touch(self, name: EntryName) -> None:
        with self._touched_lock:
            # Beyond the bound uses are forgotten until the next flush: recency is a hint.
            if name in self._touched or len(self._touched) < _MAX_TOUCHED:
                self._touched[name] = self.clock.time()

    def _evict(self, record: Record) -> None:
        try:
            closed = self.catalog.close(*record.name, "evicted")
        finally:
            self._hot.drop(record.name)
        if closed:
            self._evicted()
            _log.info("evicted %s of %s", record.manifest.key.short, record.manifest.namespace)
