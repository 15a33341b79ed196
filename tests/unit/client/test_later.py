"""Writes of cheap programs, and warnings: late, few, and never in the way."""

from __future__ import annotations

import logging
import threading

import pytest

from support.fakes import FailingStore
from torchtpu_cache.counters import Counters
from torchtpu_cache.later import LaterWriter
from torchtpu_cache.sparing import SparingLog
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import StoreFull
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.store import PutOutcome
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for


class Gated(MemoryStore):
    """Lets no put through before `gate` is set."""

    def __init__(self) -> None:
        super().__init__(limit_bytes=1 << 26)
        self.gate = threading.Event()

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        assert self.gate.wait(30)
        return super().put(entry, attestation)


def test_what_waits_is_written_at_the_end() -> None:
    store, counters = MemoryStore(limit_bytes=1 << 26), Counters()
    writer = LaterWriter(store, counters)
    entries = [entry_for(f"program {number}") for number in range(50)]
    for entry in entries:
        writer.add(entry, None)
    writer.close()
    assert all(store.contains(entry.key) for entry in entries)
    assert counters.snapshot()["failures"] == {}


def test_nobody_waits_for_a_slow_disk_and_what_is_too_much_is_counted() -> None:
    store, counters = Gated(), Counters()
    writer = LaterWriter(store, counters)
    entry = entry_for("one")
    for _ in range(1500):
        writer.add(entry, None)
    skipped = counters.snapshot()["skipped"]["disk.busy"]
    assert 1500 - 1024 - 1 <= skipped <= 1500 - 1024
    store.gate.set()
    writer.close()


def test_a_failure_is_counted_and_the_next_entry_is_tried() -> None:
    store, counters = FailingStore(StoreFull("full")), Counters()
    writer = LaterWriter(store, counters)
    for number in range(3):
        writer.add(entry_for(f"program {number}"), None)
    writer.close()
    assert counters.snapshot()["failures"] == {"disk.full": 3}


def test_a_closed_writer_takes_no_more() -> None:
    store, counters = MemoryStore(limit_bytes=1 << 20), Counters()
    writer = LaterWriter(store, counters)
    writer.close()
    writer.add(entry_for("late"), None)
    assert store.stats().entries == 0
    assert counters.snapshot()["skipped"] == {"disk.busy": 1}


def test_a_topic_is_heard_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = SparingLog(logging.getLogger("test"), clock)
    for _ in range(3):
        log.warning("disk.full", "full: %s", "really")
        log.warning("disk.io", "broken")
    assert [record.getMessage() for record in caplog.records] == ["full: really", "broken"]
    clock.advance(61)
    log.warning("disk.full", "still full")
    assert caplog.records[-1].getMessage() == "still full"
