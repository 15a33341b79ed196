"""What changes a disk store: entries are published, removed, and moved to the quarantine, within its limits.

Apart from reading, and imported when something is first written: most jobs read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, EntryTooLarge, StoreRefused, StoreUnavailable
from torchtpu_cache_core.identity import signature_of
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.paths import ensure_private_dir
from torchtpu_cache_core.store import CHEAP_COMPILE_SECONDS, PutOutcome, PutStatus, Stored
from torchtpu_cache_core.stores.failures import ATTEMPTS, is_full, is_transient, translated
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.immutable import immutable
from torchtpu_cache_core.stores.layout import Layout, shard_of
from torchtpu_cache_core.stores.machine_key import known_here
from torchtpu_cache_core.stores.publishing import make_folder, publish
from torchtpu_cache_core.stores.quarantine import Quarantine
from torchtpu_cache_core.stores.reading import OpenFile, occupied_bytes, rounded_bytes
from torchtpu_cache_core.stores.room import DiskLimits, Room
from torchtpu_cache_core.stores.shards import Shards


class Writer:
    """Writes the entries of one namespace. Thread-safe; other processes write there at the same time.

    Args:
        get: reads the entry under a key, None where there is none; sets aside what is none, and raises CorruptEntry.
        read: the entry of a key from its open file; CorruptEntry, OSError as `reading.read_entry`.
        machine_key: as in `DiskStore`.
    """

    def __init__(
        self,
        layout: Layout,
        limits: DiskLimits,
        *,
        get: Callable[[Key], Stored | None],
        read: Callable[[OpenFile, Key], Stored],
        machine_key: bytes | None,
        clock: Clock,
        files: Files,
    ) -> None:
        self.layout = layout
        self.files = files
        self.read = read
        self._machine_key = machine_key
        self.shards = Shards(layout, files, clock)
        self.quarantine = Quarantine(layout.quarantine, files, clock)
        self.room = Room(
            layout,
            limits,
            self.shards,
            clock=clock,
            files=files,
            set_aside=lambda key, error: self.set_aside(key, error.reason),
        )
        self._limit_bytes = limits.limit_bytes
        self._get = get
        self._clock = clock

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """As `DiskStore.put`."""
        if attestation is not None and self._machine_key is not None:
            attestation = known_here(attestation, self.layout.root, self._machine_key)
        block = b"" if attestation is None else attestation.to_block()
        size = rounded_bytes(entry.size_bytes + len(block))
        if size > self._limit_bytes:
            raise EntryTooLarge(size, self._limit_bytes)
        entry = immutable(entry)
        made_room = False
        with translated("the entry could not be written"):
            for attempt in range(ATTEMPTS):
                try:
                    outcome = self._put_once(entry, block, attestation, size, first=attempt == 0)
                except OSError as error:
                    if is_full(error) and not made_room:
                        made_room = True
                        self.room.evict(size, 1)
                    elif not is_transient(error) or attempt == ATTEMPTS - 1:
                        raise
                else:
                    if outcome is not None:
                        return outcome
        raise StoreUnavailable("the entry's key changed hands too often while it was written")

    def _put_once(
        self, entry: Entry, block: bytes, attestation: Attestation | None, size_bytes: int, *, first: bool
    ) -> PutOutcome | None:
        """One try; None if somebody else took the key meanwhile."""
        path, shard = self.layout.entry(entry.key), shard_of(entry.key)
        self._make_folders(shard, trusting=first)
        winner = self._standing(entry.key)
        if winner is not None:
            digest = winner.entry.digest
            status = PutStatus.SAME if digest == entry.digest else PutStatus.CONFLICT
            return PutOutcome(status, digest, winner.attestation)
        self.room.reserve(shard, size_bytes)
        occupied: int | None = None
        try:
            occupied = publish(
                self.files,
                path,
                entry,
                block,
                accessed_seconds=self._clock.time(),
                # After a loss of power the digest of a cheap one tells, and it is compiled again.
                sync=entry.header.compile_seconds >= CHEAP_COMPILE_SECONDS,
            )
        finally:
            self.room.settle(shard, size_bytes, occupied)
        return None if occupied is None else PutOutcome(PutStatus.CREATED, entry.digest, attestation)

    def _make_folders(self, shard: int, *, trusting: bool) -> None:
        """Makes what is missing. `trusting` looks no further where the folders are there."""
        folder = self.layout.shard_dir(shard)
        if trusting:
            with contextlib.suppress(FileNotFoundError):
                self.files.lstat(self.layout.account.parent)
                self.files.lstat(folder)
                return
        ensure_private_dir(self.layout.root)
        for path in (self.layout.account.parent, self.layout.quarantine, folder):
            make_folder(self.files, path, self.layout.root)

    def _standing(self, key: Key) -> Stored | None:
        """The entry that stands under a key; what is none is moved away first."""
        try:
            return self._get(key)
        except CorruptEntry as error:
            try:
                self.files.lstat(self.layout.entry(key))
            except FileNotFoundError:
                return None
            raise StoreRefused("what stands under the key is no entry and cannot be moved away") from error

    def delete(self, key: Key) -> bool:
        with translated("the entry could not be removed"):
            path = self.layout.entry(key)
            try:
                status = self.files.lstat(path)
                if not stat.S_ISREG(status.st_mode):
                    return False
                self.files.unlink(path)
            except FileNotFoundError:
                return False
            self.files.sync_folder(path.parent)
            self.room.removed(shard_of(key), occupied_bytes(status))
            return True

    def set_aside(self, key: Key, reason: CorruptReason, status: os.stat_result | None = None) -> bool:
        """Moves what stands under a key to the quarantine; False where it cannot be. Never raises.

        Args:
            status: of the file that was judged: another one that took its place meanwhile stays.
        """
        path = self.layout.entry(key)
        # Where it cannot be moved (a read-only file system), it is refused again by the next reader.
        try:
            found = self.files.lstat(path)
            if status is not None and signature_of(found) != signature_of(status):
                return False
            try:
                self.quarantine.take(path, key, reason)
            except FileNotFoundError:
                make_folder(self.files, self.layout.quarantine, self.layout.root)
                self.quarantine.take(path, key, reason)
        except OSError:
            return False
        if stat.S_ISREG(found.st_mode):
            self.room.removed(shard_of(key), occupied_bytes(found))
        return True
