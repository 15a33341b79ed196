"""The disk tier: one file per entry, shared by all processes of a user on a machine. docs/entry.md has the layout.

No daemon, no database, no scan at start. A file appears all at once and is never changed; the first one under a key
stays. The only lock is on the account, for moments, and never while entries are read or written. Whatever stands under
a key and is not its whole entry is moved to the quarantine when somebody asks for it; what is named otherwise is never
touched.
"""

from __future__ import annotations

import contextlib
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.paths import check_private_dir
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, Store, Stored, StoreStats
from torchtpu_cache_core.stores.failures import ATTEMPTS, is_transient, translated
from torchtpu_cache_core.stores.files import FILES, Files
from torchtpu_cache_core.stores.layout import Layout
from torchtpu_cache_core.stores.listing import entry_info
from torchtpu_cache_core.stores.reading import OpenFile, opened, read_entry, read_header

# What only writes and housekeeping need is imported when they first happen: most jobs read.
if TYPE_CHECKING:
    from torchtpu_cache_core.stores.quarantine import Quarantined
    from torchtpu_cache_core.stores.reports import GcReport, VerifyReport
    from torchtpu_cache_core.stores.writing import Writer

ACCESS_MARK_SECONDS: Final = 60.0


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
        self._lock = threading.RLock()  # guards the making of the writer
        self._made_writer: Writer | None = None

    @property
    def _writer(self) -> Writer:
        with self._lock:
            if self._made_writer is None:
                from torchtpu_cache_core.stores.room import DiskLimits
                from torchtpu_cache_core.stores.writing import Writer

                self._made_writer = Writer(
                    self._layout,
                    DiskLimits(
                        limit_bytes=self._limit_bytes,
                        limit_entries=self._limit_entries,
                        min_free_bytes=self._min_free_bytes,
                    ),
                    get=self._get,
                    read=self._read,
                    machine_key=self._machine_key,
                    clock=self._clock,
                    files=self._files,
                )
            return self._made_writer

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="disk", durable=True, shared=True, evicts=True, keeps_attestation=True)

    @property
    def lock_waits_seconds(self) -> list[float]:
        """How long this store waited for other processes and threads, the last thousand times."""
        return self._writer.room.lock_waits_seconds

    # ---- reading ---------------------------------------------------------------------------------------------

    def get(self, key: Key) -> Stored | None:
        """As the contract says; writes nothing but an access mark, at most once a minute per entry."""
        with translated("the entry could not be read"):
            for _ in range(ATTEMPTS - 1):
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
            self._writer.set_aside(key, error.reason, None if file is None else file.status)
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
            keys = list(self._writer.shards.keys())
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
            return self._writer.room.stats()

    # ---- writing ---------------------------------------------------------------------------------------------

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """As the contract says. What compiled in under 10 ms is not brought to the disk at once (no fsync): it
        outlives this process, but perhaps no loss of power."""
        return self._writer.put(entry, attestation)

    def delete(self, key: Key) -> bool:
        return self._writer.delete(key)

    def set_aside(self, key: Key, reason: CorruptReason) -> bool:
        """As the contract says: to the quarantine. Never raises."""
        return self._writer.set_aside(key, reason)

    # ---- housekeeping ----------------------------------------------------------------------------------------

    def gc(self) -> GcReport:
        """Counts everything anew, removes leftovers of dead writers, and brings the store within its limits.

        Raises:
            StoreError: the store cannot be listed or written.
        """
        from torchtpu_cache_core.stores.housekeeping import collect

        return collect(self._writer)

    def verify(self, repair: bool) -> VerifyReport:
        """Reads every entry to its last byte, payload included; removes leftovers of dead writers.

        Args:
            repair: moves what is no entry to the quarantine.

        Raises:
            StoreError: the store cannot be listed.
        """
        from torchtpu_cache_core.stores.housekeeping import verify

        return verify(self._writer, repair)

    def quarantined(self) -> list[Quarantined]:
        """What was set aside, oldest first. StoreError if it cannot be listed."""
        with translated("the quarantine could not be listed"):
            return self._writer.quarantine.contents()
