"""The disk tier: one file per entry, shared by all processes of a user on a machine. docs/entry.md has the layout.

No daemon, no database, no scan at start. A file appears all at once and is never changed; the first one under a key
stays. The only lock is on the account, for moments, and never while entries are read or written. Whatever stands under
a key and is not its whole entry is moved to the quarantine when somebody asks for it; what is named otherwise is never
touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.identity import signature_of
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.paths import check_private_dir, ensure_private_dir
from torchtpu_cache_core.store import (
    CHEAP_COMPILE_SECONDS,
    Capabilities,
    EntryInfo,
    PutOutcome,
    PutStatus,
    Store,
    Stored,
    StoreStats,
)
from torchtpu_cache_core.stores.failures import is_full, is_transient, translated
from torchtpu_cache_core.stores.files import FILES, Files
from torchtpu_cache_core.stores.immutable import immutable
from torchtpu_cache_core.stores.layout import SHARDS, Layout, shard_of
from torchtpu_cache_core.stores.listing import entry_info
from torchtpu_cache_core.stores.machine_key import known_here
from torchtpu_cache_core.stores.reading import OpenFile, occupied_bytes, opened, read_entry, read_header, rounded_bytes

# What only writes and housekeeping need is imported when they first happen: most jobs read.
if TYPE_CHECKING:
    from torchtpu_cache_core.stores.quarantine import Quarantine, Quarantined
    from torchtpu_cache_core.stores.reports import GcReport, VerifyReport
    from torchtpu_cache_core.stores.room import Room
    from torchtpu_cache_core.stores.shards import Inventory, Shards

ACCESS_MARK_SECONDS: Final = 60.0
_ATTEMPTS: Final = 4


class DiskStore(Store):
    """Entries of one namespace under `root`. The constructor writes nothing, so a read-only root can be read.

    Args:
        root: the cache folder; made private, with mode 0700, by the first put.
        namespace: whose entries; each namespace has its own limits.
        limit_bytes: of blocks on the disk: entries, attestation blocks, files being written, leftovers.
        limit_entries: how many entries at most.
        min_free_bytes: what stays free on the file system for others.
        machine_key: an entry whose machine's mark was not made with it is corrupt; None takes marks as they are.
        clock: for access marks, ages and listings.
        files: the operating-system calls.

    Raises:
        StoreRefused: others may write to `root`, and so run code in its readers.
    """

    def __init__(
        self,
        root: Path,
        namespace: Namespace,
        *,
        limit_bytes: int,
        limit_entries: int,
        min_free_bytes: int,
        machine_key: bytes | None = None,
        clock: Clock = SYSTEM_CLOCK,
        files: Files = FILES,
    ) -> None:
        check_private_dir(root)
        self._layout = Layout(root, namespace)
        self._limit_bytes = limit_bytes
        self._limit_entries = limit_entries
        self._min_free_bytes = min_free_bytes
        self._machine_key = machine_key
        self._clock = clock
        self._files = files
        self._lock = threading.Lock()  # guards the making of _writing
        self._writing: tuple[Shards, Quarantine, Room] | None = None

    def _for_writing(self) -> tuple[Shards, Quarantine, Room]:
        with self._lock:
            if self._writing is None:
                from torchtpu_cache_core.stores.quarantine import Quarantine
                from torchtpu_cache_core.stores.room import DiskLimits, Room
                from torchtpu_cache_core.stores.shards import Shards

                shards = Shards(self._layout, self._files, self._clock)
                room = Room(
                    self._layout,
                    DiskLimits(
                        limit_bytes=self._limit_bytes,
                        limit_entries=self._limit_entries,
                        min_free_bytes=self._min_free_bytes,
                    ),
                    shards,
                    clock=self._clock,
                    files=self._files,
                    set_aside=lambda key, error: self._set_aside(key, error.reason, None),
                )
                quarantine = Quarantine(self._layout.quarantine, self._files, self._clock)
                self._writing = (shards, quarantine, room)
            return self._writing

    @property
    def _shards(self) -> Shards:
        return self._for_writing()[0]

    @property
    def _quarantine(self) -> Quarantine:
        return self._for_writing()[1]

    @property
    def _room(self) -> Room:
        return self._for_writing()[2]

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="disk", durable=True, shared=True, evicts=True, keeps_attestation=True)

    @property
    def lock_waits_seconds(self) -> list[float]:
        """How long this store waited for other processes and threads, the last thousand times."""
        return self._room.lock_waits_seconds

    # ---- reading ---------------------------------------------------------------------------------------------

    def get(self, key: Key) -> Stored | None:
        """As the contract says; writes nothing but an access mark, at most once a minute per entry."""
        with translated("the entry could not be read"):
            for _ in range(_ATTEMPTS - 1):
                try:
                    return self._get(key)
                except OSError as error:
                    if not is_transient(error):
                        raise
            return self._get(key)

    def _get(self, key: Key) -> Stored | None:
        file: OpenFile | None = None
        try:
            with opened(self._files, self._layout.entry(key)) as file:
                stored = self._read(file, key)
                self._mark_used(file)
                return stored
        except FileNotFoundError:
            return None
        except CorruptEntry as error:
            self._set_aside(key, error.reason, None if file is None else file.status)
            raise

    def _read(self, file: OpenFile, key: Key) -> Stored:
        return read_entry(self._files, file, self._layout.namespace, key, self._machine_key)

    def _mark_used(self, file: OpenFile) -> None:
        now = self._clock.time()
        if abs(now - file.status.st_mtime) > ACCESS_MARK_SECONDS:
            # The modification time serves as the mark: mounts treat the access time as they like. Where it cannot be
            # set (a read-only file system), the entry only looks older than it is.
            with contextlib.suppress(OSError):
                self._files.utime(file.fd, now)

    def contains(self, key: Key) -> bool:
        with translated("the disk store could not be asked"):
            try:
                return stat.S_ISREG(self._files.lstat(self._layout.entry(key)).st_mode)
            except FileNotFoundError:
                return False

    def iterate(self) -> Iterator[EntryInfo]:
        with translated("the disk store could not be listed"):
            keys = list(self._shards.keys())
        for key in keys:
            try:
                with opened(self._files, self._layout.entry(key)) as file:
                    header, _ = read_header(self._files, file, key)
            except (OSError, CorruptEntry):
                continue  # it went away, or is no entry
            yield entry_info(header, size_bytes=file.status.st_size, accessed_seconds=file.status.st_mtime)

    def stats(self) -> StoreStats:
        """`size_bytes` counts blocks, as the limit does. An estimate until every shard was scanned once."""
        with translated("the disk store could not be asked"):
            return self._room.stats()

    # ---- writing ---------------------------------------------------------------------------------------------

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """As the contract says. What compiled in under 10 ms is not brought to the disk at once (no fsync): it
        outlives this process, but perhaps no loss of power."""
        if attestation is not None and self._machine_key is not None:
            attestation = known_here(attestation, self._layout.root, self._machine_key)
        block = b"" if attestation is None else attestation.to_block()
        size = rounded_bytes(entry.size_bytes + len(block))
        if size > self._limit_bytes:
            raise EntryTooLarge(size, self._limit_bytes)
        entry = immutable(entry)
        made_room = False
        with translated("the entry could not be written"):
            for attempt in range(_ATTEMPTS):
                try:
                    outcome = self._put_once(entry, block, attestation, size, first=attempt == 0)
                except OSError as error:
                    if is_full(error) and not made_room:
                        made_room = True
                        self._room.evict(size, 1)
                    elif not is_transient(error) or attempt == _ATTEMPTS - 1:
                        raise
                else:
                    if outcome is not None:
                        return outcome
        raise StoreUnavailable("the entry's key changed hands too often while it was written")

    def _put_once(
        self, entry: Entry, block: bytes, attestation: Attestation | None, size_bytes: int, *, first: bool
    ) -> PutOutcome | None:
        """One try; None if somebody else took the key meanwhile."""
        from torchtpu_cache_core.stores.publishing import publish

        path, shard = self._layout.entry(entry.key), shard_of(entry.key)
        self._make_folders(shard, trusting=first)
        winner = self._standing(entry.key)
        if winner is not None:
            digest = winner.entry.digest
            status = PutStatus.SAME if digest == entry.digest else PutStatus.CONFLICT
            return PutOutcome(status, digest, winner.attestation)
        self._room.reserve(shard, size_bytes)
        charged: int | None = None
        try:
            charged = publish(
                self._files,
                path,
                entry,
                block,
                accessed_seconds=self._clock.time(),
                # After a loss of power the digest of a cheap one tells, and it is compiled again.
                sync=entry.header.compile_seconds >= CHEAP_COMPILE_SECONDS,
            )
        finally:
            self._room.settle(shard, size_bytes, charged)
        return None if charged is None else PutOutcome(PutStatus.CREATED, entry.digest, attestation)

    def _make_folders(self, shard: int, *, trusting: bool) -> None:
        """Makes what is missing. `trusting` looks no further where the folders are there."""
        from torchtpu_cache_core.stores.publishing import make_folder

        folder = self._layout.shard_dir(shard)
        if trusting:
            with contextlib.suppress(FileNotFoundError):
                self._files.lstat(self._layout.account.parent)
                self._files.lstat(folder)
                return
        ensure_private_dir(self._layout.root)
        for path in (self._layout.account.parent, self._layout.quarantine, folder):
            make_folder(self._files, path, self._layout.root)

    def _standing(self, key: Key) -> Stored | None:
        """The entry that stands under a key; what is none is moved away first."""
        try:
            return self._get(key)
        except CorruptEntry as error:
            try:
                self._files.lstat(self._layout.entry(key))
            except FileNotFoundError:
                return None
            raise StoreRefused("what stands under the key is no entry and cannot be moved away") from error

    def delete(self, key: Key) -> bool:
        with translated("the entry could not be removed"):
            path = self._layout.entry(key)
            try:
                status = self._files.lstat(path)
                if not stat.S_ISREG(status.st_mode):
                    return False
                self._files.unlink(path)
            except FileNotFoundError:
                return False
            self._files.sync_folder(path.parent)
            self._room.removed(shard_of(key), occupied_bytes(status))
            return True

    def set_aside(self, key: Key, reason: CorruptReason) -> bool:
        """As the contract says: to the quarantine. Never raises."""
        return self._set_aside(key, reason, None)

    def _set_aside(self, key: Key, reason: CorruptReason, status: os.stat_result | None) -> bool:
        """`status` is of the file that was judged: another one that took its place meanwhile stays."""
        path = self._layout.entry(key)
        # Where it cannot be moved (a read-only file system), it is refused again by the next reader.
        try:
            found = self._files.lstat(path)
            if status is not None and signature_of(found) != signature_of(status):
                return False
            try:
                self._quarantine.take(path, key, reason)
            except FileNotFoundError:
                from torchtpu_cache_core.stores.publishing import make_folder

                make_folder(self._files, self._layout.quarantine, self._layout.root)
                self._quarantine.take(path, key, reason)
        except OSError:
            return False
        if stat.S_ISREG(found.st_mode):
            self._room.removed(shard_of(key), occupied_bytes(found))
        return True

    # ---- housekeeping ----------------------------------------------------------------------------------------

    def gc(self) -> GcReport:
        """Counts everything anew, removes leftovers of dead writers, and brings the store within its limits.

        Raises:
            StoreError: the store cannot be listed or written.
        """
        from torchtpu_cache_core.stores.publishing import make_folder
        from torchtpu_cache_core.stores.reports import GcReport

        with translated("the disk store could not be collected"):
            if not self._shards.present():
                return GcReport(entries=0, size_bytes=0, evicted=0, leftovers_removed=0, foreign=())
            make_folder(self._files, self._layout.account.parent, self._layout.root)
            before = self._room.snapshot()
            inventories = dict(self._inventories(range(SHARDS)))
            evicted = self._room.recount(inventories, before)
            self._quarantine.trim()
            ledger = self._room.snapshot()
        return GcReport(
            entries=ledger.total_entries(),
            size_bytes=ledger.total_bytes(),
            evicted=evicted,
            leftovers_removed=sum(found.collected for found in inventories.values()),
            foreign=tuple(name for found in inventories.values() for name in found.foreign),
        )

    def _inventories(self, shards: Iterable[int]) -> Iterator[tuple[int, Inventory]]:
        """Looks at each shard; one whose folder cannot be listed hides no other."""
        for shard in shards:
            try:
                found = self._shards.inventory(shard)
            except OSError:
                continue
            yield shard, found

    def verify(self, repair: bool) -> VerifyReport:
        """Reads every entry to its last byte, payload included; removes leftovers of dead writers.

        Args:
            repair: moves what is no entry to the quarantine.

        Raises:
            StoreError: the store cannot be listed.
        """
        from torchtpu_cache_core.stores.reports import VerifyReport

        report = VerifyReport()
        with translated("the disk store could not be checked"):
            shards = self._shards.present()
            inventories = dict(self._inventories(shards))
            report.unlistable += [f"{shard:02x}" for shard in shards if shard not in inventories]
            for found in inventories.values():
                report.foreign += found.foreign
                report.leftovers_removed += found.collected
                for key in found.keys:
                    self._verify(key, repair, report)
        return report

    def _verify(self, key: Key, repair: bool, report: VerifyReport) -> None:
        from torchtpu_cache_core.stores.reports import BadEntry

        file: OpenFile | None = None
        try:
            with opened(self._files, self._layout.entry(key)) as file:
                stored = self._read(file, key)
            stored.entry.executable()
        except FileNotFoundError:
            return
        except OSError as error:
            report.unreadable.append((key, os.strerror(error.errno or errno.EIO)))
        except CorruptEntry as error:
            status = None if file is None else file.status
            moved = repair and self._set_aside(key, error.reason, status)
            report.bad.append(BadEntry(key, error.reason, error.detail, moved))
        else:
            report.entries += 1
            report.size_bytes += stored.entry.size_bytes

    def quarantined(self) -> list[Quarantined]:
        """What was set aside, oldest first. StoreError if it cannot be listed."""
        with translated("the quarantine could not be listed"):
            return self._quarantine.contents()
