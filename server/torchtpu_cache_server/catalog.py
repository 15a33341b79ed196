"""What is published under which key: the one place that reads and changes manifests, tombstones, blobs and index.

Order of a publish: blob, manifest, index. Order of a close: tombstone, index, manifest, blob. Whatever a crash leaves
half done is therefore invisible, or already closed; the next start reconciles the index with the bucket.

Locks: `entry` (one per namespace and key) before `blob` (one per digest). A blob's lock is held from before its
create until its manifest is in the index, so that no collector sees it without a reference.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.jsontext import canonical_json
from torchtpu_cache_core.manifest import MAX_MANIFEST_BYTES, Manifest
from torchtpu_cache_core.names import Digest, Key, Namespace
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_server.blobs.bucket import Bucket, OpenObject, Staged
from torchtpu_cache_server.blobs.entries import check_blob, header_of_blob
from torchtpu_cache_server.blobs.generations import generations_of
from torchtpu_cache_server.blobs.layout import (
    ENTRIES,
    ObjectName,
    blob_name,
    manifest_name,
    parse_generation,
    tombstone_name,
)
from torchtpu_cache_server.index.base import EntryName, Index, IndexCorrupt, Record
from torchtpu_cache_server.locks import NamedLocks

_log = logging.getLogger(__name__)

_MAX_TRIES: Final = 8
"""Names that something foreign occupies are passed over, but not for ever."""


class Catalog:
    """Open entries by namespace and key, over a bucket and an index. Thread-safe.

    Args:
        writer: what new manifests name as their writer.
    """

    def __init__(self, bucket: Bucket, index: Index, *, clock: Clock, writer: str = "local") -> None:
        self._bucket = bucket
        self._index = index
        self._clock = clock
        self._writer = writer
        self._entries = NamedLocks()
        self._blobs = NamedLocks()
        self._doubts = 0

    @property
    def doubts(self) -> int:
        """Grows whenever the index may have come to differ from the bucket."""
        return self._doubts

    def doubt_index(self, error: StoreError) -> None:
        """Takes note that bucket and index may differ: the bucket is asked until a reconciliation has passed."""
        _log.warning("the index will be reconciled with the bucket: %s", error)
        self._doubts += 1
        self._index.set_complete(False)
        if isinstance(error, IndexCorrupt):
            try:
                self._index.reset()
            except StoreError as again:
                _log.error("the damaged index could not be replaced: %s", again)

    def find(self, namespace: Namespace, key: Key) -> Record | None:
        """The open entry of a key, or None.

        Raises:
            CorruptEntry: what stood there was none; it is closed now.
            StoreError: the bucket could not say.
        """
        if self._index.complete:
            try:
                if (record := self._index.lookup(namespace, key)) is not None:
                    return record
            except StoreError as error:
                self.doubt_index(error)
        if generations_of(self._bucket, namespace, key).open is None:
            return None
        with self._entries.hold((namespace, key)):
            return self._synchronised(namespace, key)

    def publish(
        self, namespace: Namespace, header: Header, digest: Digest, size_bytes: int, staged: Staged
    ) -> tuple[PutStatus, Record]:
        """Makes a checked and staged blob the entry of its key, unless the key has a sound one.

        Raises:
            StoreError: nothing was published; what was may still be read.
        """
        key = header.key
        with self._entries.hold((namespace, key)):
            standing = self._standing(namespace, key)
            if standing is not None:
                same = standing.manifest.digest == digest
                return (PutStatus.SAME if same else PutStatus.CONFLICT), standing
            with self._blobs.hold(digest):
                try:
                    self._create_blob(digest, size_bytes, staged)
                    manifest = self._create_manifest(namespace, key, digest, size_bytes)
                except StoreError:
                    self._give_up_blob(digest)
                    raise
                with self._changing():
                    # Where others write too, a collector may have taken an old blob before it saw the manifest.
                    if self._bucket.head(staged.name) is None:
                        self._create_blob(digest, size_bytes, staged)
                    record = Record.of(manifest, header, self._clock.time())
                    self._record(record)
        return PutStatus.CREATED, record

    def standing(self, namespace: Namespace, key: Key) -> Record | None:
        """The open entry of a key if its bytes are sound; one that is not is closed."""
        with self._entries.hold((namespace, key)):
            return self._standing(namespace, key)

    def close(self, namespace: Namespace, key: Key, reason: str) -> bool:
        """Closes the open entry of a key for good; False if there is none.

        Args:
            reason: for people, kept in the tombstone: `deleted`, `evicted` or `corrupt`.
        """
        with self._entries.hold((namespace, key)):
            try:
                record = self._synchronised(namespace, key)
            except CorruptEntry:
                return True  # it is closed now
            if record is not None:
                self._close(record, reason)
        return record is not None

    def blob_of(self, manifest: Manifest) -> OpenObject:
        """The blob that a manifest names, open; CorruptEntry if there is none."""
        blob = self._bucket.open(blob_name(manifest.digest))
        if blob is None:
            raise CorruptEntry(CorruptReason.SHORT, "the manifest names a blob that is not there")
        return blob

    def verify(self, record: Record, blob: OpenObject) -> None:
        """Reads a whole blob and checks that it is the entry that its manifest names.

        Raises:
            CorruptEntry: it is not.
            StoreError: it could not be read.
        """
        manifest = record.manifest
        header, digest = check_blob(blob)
        if digest != manifest.digest:
            raise CorruptEntry(CorruptReason.DIGEST, "the blob is not the one that its manifest names")
        if header.key != manifest.key:
            raise CorruptEntry(CorruptReason.KEY, "the blob holds another key")

    def condemn(self, record: Record, error: CorruptEntry) -> bool:
        """Closes an entry whose bytes are bad; False if it was closed or replaced meanwhile."""
        with self._entries.hold(record.name):
            try:
                current = self._synchronised(*record.name)
            except CorruptEntry:
                return True
            if current is None or current.manifest != record.manifest:
                return False
            _log.error("entry %s of %s is set aside: %s", record.manifest.key.short, record.manifest.namespace, error)
            self._set_aside(record)
        return True

    def release_blob(self, digest: Digest, unused_since_seconds: float | None = None) -> bool:
        """Deletes a blob that no manifest in any namespace names; False if it must stay.

        Args:
            unused_since_seconds: only if it was last created or refreshed before that; None where age is no matter.
        """
        with self._blobs.hold(digest):
            return self._release_blob(digest, unused_since_seconds)

    def synchronise(self, namespace: Namespace, key: Key) -> None:
        """Makes the index say of one key what the bucket says.

        Raises:
            CorruptEntry: what stood there was no entry; it is closed now.
        """
        with self._entries.hold((namespace, key)):
            self._synchronised(namespace, key, trust_index=False)

    def names(self) -> Iterator[EntryName]:
        """All keys that the bucket has or had entries of."""
        previous = None
        for found in self._bucket.list(ENTRIES):
            generation = parse_generation(found.name)
            if generation is not None and (name := (generation.namespace, generation.key)) != previous:
                previous = name
                yield name

    def _synchronised(self, namespace: Namespace, key: Key, *, trust_index: bool = True) -> Record | None:
        """The open entry as the bucket has it, with the index brought in line. Under the entry's lock.

        Raises:
            CorruptEntry: it was none, and is closed now.
        """
        known = None
        try:
            known = self._index.lookup(namespace, key)
        except StoreError as error:
            self.doubt_index(error)
        if known is not None and trust_index and self._index.complete:
            return known
        generations = generations_of(self._bucket, namespace, key)
        self._remove(generations.superseded)  # what a close that was killed, or failed, left
        number = generations.open
        if number is None:
            if known is not None:
                self._forget(namespace, key)
            return None
        if known is not None and known.manifest.generation == number and self._is_current(known):
            return known
        try:
            record = self._load(namespace, key, number)
        except CorruptEntry as error:
            _log.error("generation %d of %s in %s is closed: %s", number, key.short, namespace, error)
            self._bury(namespace, key, number, "corrupt")
            raise
        self._record(record)
        return record

    def _is_current(self, known: Record) -> bool:
        raw = self._bucket.read(manifest_name(*known.name, known.manifest.generation), MAX_MANIFEST_BYTES + 1)
        return raw == known.manifest.to_bytes()

    def _load(self, namespace: Namespace, key: Key, number: int) -> Record:
        """The record of a generation, from its manifest and its blob's header."""
        raw = self._bucket.read(manifest_name(namespace, key, number), MAX_MANIFEST_BYTES + 1)
        manifest = Manifest.from_bytes(raw or b"")
        if (manifest.namespace, manifest.key, manifest.generation) != (namespace, key, number):
            raise CorruptEntry(CorruptReason.MANIFEST, "the manifest speaks of another entry")
        with self.blob_of(manifest) as blob:
            header = header_of_blob(blob)
            if blob.size_bytes != manifest.size_bytes:
                raise CorruptEntry(CorruptReason.LENGTH, "the blob and its manifest differ in length")
        if header.key != key:
            raise CorruptEntry(CorruptReason.KEY, "the blob holds another key")
        return Record.of(manifest, header, self._clock.time())

    def _standing(self, namespace: Namespace, key: Key) -> Record | None:
        try:
            record = self._synchronised(namespace, key, trust_index=False)
        except CorruptEntry:
            return None
        if record is None:
            return None
        try:
            with self.blob_of(record.manifest) as blob:
                self.verify(record, blob)
        except CorruptEntry as error:
            _log.error("entry %s of %s is set aside: %s", key.short, namespace, error)
            self._set_aside(record)
            return None
        return record

    def _give_up_blob(self, digest: Digest) -> None:
        """What cannot be removed now is collected when it is a day old."""
        if self._bucket.capabilities.exclusive:
            with contextlib.suppress(StoreError):
                self._release_blob(digest, None)

    def _create_blob(self, digest: Digest, size_bytes: int, staged: Staged) -> None:
        """Under the blob's lock."""
        for _ in range(_MAX_TRIES):
            if self._bucket.create(staged):
                return
            if self._is_sound(digest, size_bytes) and self._bucket.refresh(staged.name):
                return
            if not self._bucket.set_aside(staged.name):
                break
        raise StoreRefused("something foreign stands where the blob should be")

    def _is_sound(self, digest: Digest, size_bytes: int) -> bool:
        blob = self._bucket.open(blob_name(digest))
        if blob is None:
            return False
        with blob:
            try:
                return blob.size_bytes == size_bytes and check_blob(blob)[1] == digest
            except CorruptEntry:
                return False

    def _create_manifest(self, namespace: Namespace, key: Key, digest: Digest, size_bytes: int) -> Manifest:
        number = generations_of(self._bucket, namespace, key).highest
        for _ in range(_MAX_TRIES):
            number += 1
            manifest = Manifest(
                namespace=namespace,
                key=key,
                generation=number,
                digest=digest,
                size_bytes=size_bytes,
                writer=self._writer,
                created_seconds=float(self._clock.time()),
            )
            if self._create(manifest_name(namespace, key, number), manifest.to_bytes()):
                return manifest
        raise StoreUnavailable("the manifest lost to other writers again and again")

    def _set_aside(self, record: Record) -> None:
        self._bucket.make_way()
        digest = record.manifest.digest
        with self._blobs.hold(digest):
            # A put of the same bytes elsewhere may have replaced the bad ones meanwhile, and its entry needs them.
            # Other entries that name bad bytes are found bad in their turn.
            if not self._is_sound(digest, record.manifest.size_bytes):
                self._bucket.set_aside(blob_name(digest))
        self._close(record, "corrupt")

    def _close(self, record: Record, reason: str) -> None:
        """Under the entry's lock."""
        self._bury(*record.name, record.manifest.generation, reason)
        if self._bucket.capabilities.exclusive:
            with self._blobs.hold(record.manifest.digest):
                self._release_blob(record.manifest.digest, None)

    def _bury(self, namespace: Namespace, key: Key, number: int, reason: str) -> None:
        tombstone = tombstone_name(namespace, key, number)
        note = canonical_json({"closed_seconds": float(self._clock.time()), "reason": reason})
        self._bucket.make_way()
        self._create(tombstone, note)
        self._forget(namespace, key)
        self._remove(generations_of(self._bucket, namespace, key).superseded)

    def _remove(self, superseded: list[ObjectName]) -> None:
        """Under the entry's lock. They say nothing any more, so what cannot be removed now costs only its room."""
        with contextlib.suppress(StoreError):
            for name in superseded:
                self._bucket.delete(name)

    def _release_blob(self, digest: Digest, unused_since_seconds: float | None) -> bool:
        """Under the blob's lock. An index in doubt cannot prove that nothing names the blob."""
        name = blob_name(digest)
        try:
            if not self._index.complete or self._index.references(digest):
                return False
        except StoreError as error:
            self.doubt_index(error)
            return False
        if unused_since_seconds is not None:
            found = self._bucket.head(name)
            if found is None or found.modified_seconds >= unused_since_seconds:
                return False
        return self._bucket.delete(name)

    def _create(self, name: ObjectName, data: bytes) -> bool:
        with self._bucket.stage(name) as staged:
            staged.write(data)
            with self._changing():
                return self._bucket.create(staged)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """What fails in here may have happened or not, so bucket and index may differ."""
        try:
            yield
        except StoreError as error:
            self.doubt_index(error)
            raise

    def _record(self, record: Record) -> None:
        try:
            self._index.record(record)
        except StoreError as error:
            self.doubt_index(error)

    def _forget(self, namespace: Namespace, key: Key) -> None:
        try:
            self._index.remove(namespace, key)
        except StoreError as error:
            self.doubt_index(error)
