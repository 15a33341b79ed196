"""What an operator asks of a disk store: to count it anew and bring it within its limits, and to read all of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator

from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.stores.failures import translated
from torchtpu_cache_core.stores.layout import SHARDS
from torchtpu_cache_core.stores.publishing import make_folder
from torchtpu_cache_core.stores.reading import OpenFile, opened
from torchtpu_cache_core.stores.reports import BadEntry, GcReport, VerifyReport
from torchtpu_cache_core.stores.shards import Inventory
from torchtpu_cache_core.stores.writing import Writer


def collect(writer: Writer) -> GcReport:
    """As `DiskStore.gc`."""
    with translated("the disk store could not be collected"):
        if not writer.shards.present():
            return GcReport(entries=0, size_bytes=0, evicted=0, leftovers_removed=0, foreign=())
        make_folder(writer.files, writer.layout.account.parent, writer.layout.root)
        before = writer.room.snapshot()
        inventories = dict(_inventories(writer, range(SHARDS)))
        evicted = writer.room.recount(inventories, before)
        writer.quarantine.trim()
        ledger = writer.room.snapshot()
    return GcReport(
        entries=ledger.total_entries(),
        size_bytes=ledger.total_bytes(),
        evicted=evicted,
        leftovers_removed=sum(found.collected for found in inventories.values()),
        foreign=tuple(name for found in inventories.values() for name in found.foreign),
    )


def verify(writer: Writer, repair: bool) -> VerifyReport:
    """As `DiskStore.verify`."""
    report = VerifyReport()
    with translated("the disk store could not be checked"):
        shards = writer.shards.present()
        inventories = dict(_inventories(writer, shards))
        report.unlistable += [f"{shard:02x}" for shard in shards if shard not in inventories]
        for found in inventories.values():
            report.foreign += found.foreign
            report.leftovers_removed += found.collected
            for key in found.keys:
                _verify(writer, key, repair, report)
    return report


def _verify(writer: Writer, key: Key, repair: bool, report: VerifyReport) -> None:
    file: OpenFile | None = None
    try:
        with opened(writer.files, writer.layout.entry(key)) as file:
            stored = writer.read(file, key)
        stored.entry.executable()
    except FileNotFoundError:
        return
    except OSError as error:
        report.unreadable.append((key, os.strerror(error.errno or errno.EIO)))
    except CorruptEntry as error:
        status = None if file is None else file.status
        moved = repair and writer.set_aside(key, error.reason, status)
        report.bad.append(BadEntry(key, error.reason, error.detail, moved))
    else:
        report.entries += 1
        report.size_bytes += stored.entry.size_bytes


def _inventories(writer: Writer, shards: Iterable[int]) -> Iterator[tuple[int, Inventory]]:
    """Looks at each shard; one whose folder cannot be listed hides no other."""
    for shard in shards:
        try:
            found = writer.shards.inventory(shard)
        except OSError:
            continue
        yield shard, found
