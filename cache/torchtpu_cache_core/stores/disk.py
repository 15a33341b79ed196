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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.eviction import choose
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.paths import check_private_dir, ensure_private_dir
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, PutStatus, Store, Stored, StoreStats
from torchtpu_cache_core.stores.account import Account
from torchtpu_cache_core.stores.failures import is_full, is_transient, translated
from torchtpu_cache_core.stores.files import FILES, Files
from torchtpu_cache_core.stores.immutable import immutable
from torchtpu_cache_core.stores.layout import SHARDS, Layout, shard_of
from torchtpu_cache_core.stores.ledger import Excess, Ledger, ShardScan
from torchtpu_cache_core.stores.listing import entry_info
from torchtpu_cache_core.stores.publishing import make_folder, publish, sync_folder
from torchtpu_cache_core.stores.quarantine import Quarantine, Quarantined
from torchtpu_cache_core.stores.reading import OpenFile, charged_bytes, opened, read_entry, read_header, rounded_bytes
from torchtpu_cache_core.stores.reports import BadEntry, GcReport, VerifyReport
from torchtpu_cache_core.stores.shards import Shards

CHEAP_COMPILE_SECONDS: Final = 0.01
"""What compiles faster is not worth an fsync: after a loss of power its digest tells, and it is compiled again."""

ACCESS_MARK_SECONDS: Final = 60.0
_ATTEMPTS: Final = 4
_SLACK: Final = 20  # an eviction frees a twentieth of a limit beyond need, so that the next puts need none
_SAMPLE: Final = 64
_MAX_SAMPLE: Final = 512
_MAX_ROUNDS: Final = 4  # with _MAX_SAMPLE, what one put may evict at most
_STATS_SCANS: Final = 16


class DiskStore(Store):
    """Entries of one namespace under `root`. The constructor writes nothing, so a read-only root can be read.

    Args:
        root: the cache folder; made private, with mode 0700, by the first put.
        namespace: whose entries; each namespace has its own limits.
        limit_bytes: of blocks on the disk: entries, attestation blocks, files being written, leftovers.
        limit_entries: how many entries at most.
        min_free_bytes: what stays free on the file system for others.
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
        clock: Clock = SYSTEM_CLOCK,
        files: Files = FILES,
    ) -> None:
        check_private_dir(root)
        self._layout = Layout(root, namespace)
        self._limit_bytes = limit_bytes
        self._limit_entries = limit_entries
        self._min_free_bytes = min_free_bytes
        self._clock = clock
        self._files = files
        self._shards = Shards(self._layout, files, clock)
        self._quarantine = Quarantine(self._layout.quarantine, files, clock)
        self._account = Account(self._layout.account, files, self._fresh_ledger)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="disk", durable=True, shared=True, evicts=True, keeps_attestation=True)

    @property
    def lock_waits_seconds(self) -> list[float]:
        """How long this store waited for other processes and threads, the last thousand times."""
        return list(self._account.waits_seconds)

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
                stored = read_entry(self._files, file, self._layout.namespace, key)
                self._mark_used(file)
                return stored
        except FileNotFoundError:
            return None
        except CorruptEntry as error:
            self._set_aside(key, error.reason, None if file is None else file.status)
            raise

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
            ledger = self._account.snapshot()
            unseen = [shard for shard in range(SHARDS) if not ledger.scanned_seconds[shard]]
            self._accept(ledger, [self._scanned(shard, ledger.changes[shard]) for shard in unseen[:_STATS_SCANS]])
        return StoreStats(
            entries=ledger.total_entries(),
            size_bytes=ledger.total_bytes(),
            limit_bytes=self._limit_bytes,
            limit_entries=self._limit_entries,
        )

    # ---- writing ---------------------------------------------------------------------------------------------

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """As the contract says. What compiled in under 10 ms is not brought to the disk at once (no fsync): it
        outlives this process, but perhaps no loss of power."""
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
                        self._evict(size, 1)
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
        path, shard = self._layout.entry(entry.key), shard_of(entry.key)
        self._make_folders(shard, trusting=first)
        winner = self._standing(entry.key)
        if winner is not None:
            digest = winner.entry.digest
            status = PutStatus.SAME if digest == entry.digest else PutStatus.CONFLICT
            return PutOutcome(status, digest, winner.attestation)
        self._reserve(shard, size_bytes)
        charged: int | None = None
        try:
            charged = publish(
                self._files,
                path,
                entry,
                block,
                accessed_seconds=self._clock.time(),
                sync=entry.header.compile_seconds >= CHEAP_COMPILE_SECONDS,
            )
        finally:
            self._settle(shard, size_bytes, charged)
        return None if charged is None else PutOutcome(PutStatus.CREATED, entry.digest, attestation)

    def _make_folders(self, shard: int, *, trusting: bool) -> None:
        """Makes what is missing. `trusting` looks no further where the folders are there."""
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
            sync_folder(self._files, path.parent)
            self._adjust(lambda ledger: ledger.remove(shard_of(key), charged_bytes(status)))
            return True

    def set_aside(self, key: Key, reason: CorruptReason) -> bool:
        """Moves the entry of `key` to the quarantine, for a reader who found what only unpacking or loading shows.

        True if there was one and it is gone; never raises.
        """
        return self._set_aside(key, reason, None)

    def _set_aside(self, key: Key, reason: CorruptReason, status: os.stat_result | None) -> bool:
        """`status` is of the file that was judged: another one that took its place meanwhile stays."""
        path = self._layout.entry(key)
        # Where it cannot be moved (a read-only file system), it is refused again by the next reader.
        try:
            found = self._files.lstat(path)
            if status is not None and _identity(found) != _identity(status):
                return False
            try:
                self._quarantine.take(path, key, reason)
            except FileNotFoundError:
                make_folder(self._files, self._layout.quarantine, self._layout.root)
                self._quarantine.take(path, key, reason)
        except OSError:
            return False
        if stat.S_ISREG(found.st_mode):
            self._adjust(lambda ledger: ledger.remove(shard_of(key), charged_bytes(found)))
        return True

    # ---- room ------------------------------------------------------------------------------------------------

    def _reserve(self, shard: int, size_bytes: int) -> None:
        """Counts what is about to be written, and makes room for it; StoreFull if there is none."""
        with self._account.changing() as ledger:
            due = ledger.due(shard, self._clock.time())
            changes = {number: ledger.changes[number] for number in due}
            excess = None if due else self._booked(ledger, shard, size_bytes)
        if excess is None:
            scans = [self._scanned(number, changes[number]) for number in due]
            with self._account.changing() as ledger:
                self._accept(ledger, scans)
                excess = self._booked(ledger, shard, size_bytes)
        try:
            self._keep_limits(excess)
            self._keep_free_space(size_bytes)
        except BaseException:
            self._settle(shard, size_bytes, None)
            raise

    def _booked(self, ledger: Ledger, shard: int, size_bytes: int) -> Excess:
        ledger.reserve(shard, size_bytes)
        return ledger.excess(self._limit_bytes, self._limit_entries)

    def _settle(self, shard: int, reserved_bytes: int, charged_bytes: int | None) -> None:
        """Ends a reservation, with what became of it."""

        def change(ledger: Ledger) -> None:
            ledger.release(shard, reserved_bytes)
            if charged_bytes is not None:
                ledger.add(shard, charged_bytes)

        self._adjust(change)

    def _adjust(self, change: Callable[[Ledger], None]) -> None:
        """Tells the account of something that is done. If that fails, the next scan of the shard finds out."""
        with contextlib.suppress(StoreError), self._account.changing() as ledger:
            change(ledger)

    def _keep_limits(self, excess: Excess) -> None:
        for _ in range(_MAX_ROUNDS):
            if not excess:
                return
            excess = self._evict(
                excess.size_bytes + self._limit_bytes // _SLACK if excess.size_bytes > 0 else 0,
                excess.entries + self._limit_entries // _SLACK if excess.entries > 0 else 0,
            )
        if excess:
            raise StoreFull(
                f"the disk store is at its limits of {self._limit_bytes:,} bytes and "
                f"{self._limit_entries:,} entries, and could not make room"
            )

    def _keep_free_space(self, size_bytes: int) -> None:
        missing = self._missing_bytes(size_bytes)
        # Where others fill the disk, dropping all that we have would help nobody.
        if 0 < missing <= self._account.snapshot().total_bytes() - size_bytes:
            self._evict(missing, 0)
            missing = self._missing_bytes(size_bytes)
        if missing > 0:
            raise StoreFull(f"the disk is almost full: {self._min_free_bytes:,} bytes are to stay free on it")

    def _missing_bytes(self, size_bytes: int) -> int:
        space = self._files.statvfs(self._layout.root)
        return size_bytes + self._min_free_bytes - space.f_bavail * space.f_frsize

    def _evict(self, need_bytes: int, need_entries: int) -> Excess:
        """Removes the least worth of a sample of bounded size; gives what is still too much."""
        ledger = self._account.snapshot()
        mean_bytes = max(1, ledger.total_bytes() // max(1, ledger.total_entries()))
        likely = max(need_entries, need_bytes // mean_bytes)
        candidates, corrupt = self._shards.sample(min(_MAX_SAMPLE, max(_SAMPLE, 2 * likely)))
        now = self._clock.time()
        victims = choose(candidates, ledger.inflation, now, need_bytes=need_bytes, need_entries=need_entries)
        removed: list[tuple[int, int]] = []
        for victim in victims:
            with contextlib.suppress(OSError):  # another process was quicker
                self._files.unlink(self._layout.entry(victim.item))
                removed.append((shard_of(victim.item), victim.size_bytes))
        for key, error in corrupt:
            self._set_aside(key, error.reason, None)
        with self._account.changing() as shared:
            for shard, size in removed:
                shared.remove(shard, size)
            shared.inflation.rise(now, ledger.inflation.at(now))
            return shared.excess(self._limit_bytes, self._limit_entries)

    def _fresh_ledger(self) -> Ledger:
        """Of a store whose account is new or lost: what has no folder is known to be empty."""
        ledger, now = Ledger(), self._clock.time()
        present = set(self._shards.present())
        ledger.scanned_seconds = [0.0 if shard in present else now for shard in range(SHARDS)]
        return ledger

    def _scanned(self, shard: int, change: int) -> ShardScan | int:
        """What a scan found, or the bare shard where its folder cannot be listed."""
        try:
            return self._shards.inventory(shard).scan(shard, change)
        except OSError:
            return shard

    def _accept(self, ledger: Ledger, scans: Iterable[ShardScan | int]) -> None:
        now = self._clock.time()
        for scan in scans:
            if isinstance(scan, ShardScan):
                ledger.accept(scan, now)
            else:
                ledger.postpone(scan, now)  # one folder that cannot be listed stops no put into another

    # ---- housekeeping ----------------------------------------------------------------------------------------

    def gc(self) -> GcReport:
        """Counts everything anew, removes leftovers of dead writers, and brings the store within its limits.

        Raises:
            StoreError: the store cannot be listed or written.
        """
        with translated("the disk store could not be collected"):
            if not self._shards.present():
                return GcReport(entries=0, size_bytes=0, evicted=0, leftovers_removed=0, foreign=())
            make_folder(self._files, self._layout.account.parent, self._layout.root)
            ledger = self._account.snapshot()
            inventories = [(shard, self._shards.inventory(shard)) for shard in range(SHARDS)]
            with self._account.changing() as shared:
                self._accept(shared, [found.scan(shard, ledger.changes[shard]) for shard, found in inventories])
                before = shared.total_entries()
                excess = shared.excess(self._limit_bytes, self._limit_entries)
            while excess:
                last, excess = excess, self._evict(excess.size_bytes, excess.entries)
                if excess == last:
                    break  # what is left is not ours to remove
            self._quarantine.trim()
            ledger = self._account.snapshot()
        return GcReport(
            entries=ledger.total_entries(),
            size_bytes=ledger.total_bytes(),
            evicted=max(0, before - ledger.total_entries()),
            leftovers_removed=sum(found.collected for _, found in inventories),
            foreign=tuple(name for _, found in inventories for name in found.foreign),
        )

    def verify(self, repair: bool) -> VerifyReport:
        """Reads every entry to its last byte, payload included.

        Args:
            repair: moves what is no entry to the quarantine.

        Raises:
            StoreError: the store cannot be listed.
        """
        report = VerifyReport()
        with translated("the disk store could not be checked"):
            for shard in self._shards.present():
                found = self._shards.inventory(shard)
                report.foreign += found.foreign
                report.leftovers_removed += found.collected
                for key in found.keys:
                    self._verify(key, repair, report)
        return report

    def _verify(self, key: Key, repair: bool, report: VerifyReport) -> None:
        file: OpenFile | None = None
        try:
            with opened(self._files, self._layout.entry(key)) as file:
                stored = read_entry(self._files, file, self._layout.namespace, key)
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


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Which file this is: inodes are used again at once, so more than the inode."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
