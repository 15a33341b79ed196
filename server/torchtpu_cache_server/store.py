"""One namespace of the service as a store, without HTTP: what the contract suite holds against files and SQLite."""

from __future__ import annotations

from collections.abc import Iterator

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, Store, Stored, StoreStats
from torchtpu_cache_core.wire import MAX_PAGE
from torchtpu_cache_server.service import Service


class ServiceStore(Store):
    """The entries of one namespace. The service is the caller's, who closes it.

    `stats` counts this namespace against the limits of the whole service.
    """

    def __init__(self, service: Service, namespace: Namespace) -> None:
        self._service = service
        self._namespace = namespace

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="service", durable=True, evicts=True)

    def get(self, key: Key) -> Stored | None:
        found = self._service.open(self._namespace, key)
        if found is None:
            return None
        with found.blob:
            raw = found.blob.read_at(0, found.manifest.size_bytes)
        entry = Entry.parse(raw, self._service.limits.max_entry_bytes)
        entry.check(key)
        found.manifest.check(self._namespace, key, entry.digest)
        return Stored(entry, Attestation(manifest=found.manifest))

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        status, manifest = self._service.put(self._namespace, entry)
        return PutOutcome(status, manifest.digest, Attestation(manifest=manifest))

    def contains(self, key: Key) -> bool:
        found = None
        try:
            found = self._service.open(self._namespace, key)
        except CorruptEntry:
            return False  # it is set aside now
        if found is None:
            return False
        found.blob.close()
        return True

    def delete(self, key: Key) -> bool:
        return self._service.delete(self._namespace, key)

    def iterate(self) -> Iterator[EntryInfo]:
        cursor: str | None = ""
        while cursor is not None:
            page = self._service.page(self._namespace, after=cursor, limit=MAX_PAGE)
            yield from page.entries
            cursor = page.cursor

    def stats(self) -> StoreStats:
        return self._service.stats(self._namespace)
