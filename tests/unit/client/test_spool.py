"""The spool: nothing leaves it that the remote did not take or refuse for good, and a later run goes on."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fakes import FailingStore
from torchtpu_cache.counters import Counters
from torchtpu_cache.spool import Spool, spool_folder, spool_stats
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import EntryTooLarge, FailureKind, StoreError, StoreFull, StoreRefused, StoreUnavailable
from torchtpu_cache_core.key import Component
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Namespace
from torchtpu_cache_core.store import PutOutcome, Store
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.testing.clock import ManualClock


def entry(name: str = "one", *, size: int = 1000, compile_seconds: float = 1.0) -> Entry:
    return Entry.build(
        os.urandom(size),
        components=[Component.of("name", name)],
        executable_format="pjrt",
        producer="test",
        road="client",
        compile_seconds=compile_seconds,
        created_seconds=1.0,
    )


def spool(tmp_path: Path, remote: Store, limit_bytes: int = 1 << 20) -> Spool:
    return Spool(tmp_path / "spool", remote, Counters(), limit_bytes=limit_bytes)


def counted(made: Spool, what: str) -> dict[str, int]:
    return made._counters.snapshot()[what]


class ForkingStore(FailingStore):
    """Forks a child, which lives until it is ended, and fails."""

    child: int | None = None

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        if (pid := os.fork()) == 0:
            signal.pause()
        self.child = pid
        return super().put(entry, attestation)


def idle(made: Spool) -> Spool:
    """Without the background uploader, so that a test sees each round."""
    made._start = lambda: None  # type: ignore[method-assign]
    return made


def test_an_entry_waits_in_a_file_until_the_remote_has_it(tmp_path: Path) -> None:
    remote = MemoryStore(limit_bytes=1 << 20)
    made, one = idle(spool(tmp_path, remote)), entry()
    assert made.add(one, durable=True)
    assert made.stats() == spool_stats(tmp_path / "spool")
    assert made.stats().entries == 1
    assert made.run_once() == 0
    assert remote.contains(one.key)
    assert made.stats().entries == 0


def test_a_later_run_uploads_what_an_earlier_one_left(tmp_path: Path) -> None:
    away = FailingStore(StoreUnavailable("away", FailureKind.CONNECT))
    first, one = idle(spool(tmp_path, away)), entry()
    first.add(one, durable=True)
    assert first.run_once() == 1
    first.close()
    remote = MemoryStore(limit_bytes=1 << 20)
    later = spool(tmp_path, remote)
    later.resume()
    assert later.drain(10).entries == 0
    assert remote.contains(one.key)
    later.close()


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (StoreUnavailable("away", FailureKind.CONNECT), True),
        (StoreUnavailable("busy", FailureKind.THROTTLED), True),
        (StoreUnavailable("broken", FailureKind.SERVER_ERROR), True),
        (StoreFull("full"), True),
        (StoreRefused("no login", FailureKind.UNAUTHORIZED), True),
        (StoreRefused("not our service", FailureKind.PROTOCOL), True),
        (StoreRefused("no", FailureKind.FORBIDDEN), False),
        (StoreRefused("read-only", FailureKind.READ_ONLY), False),
        (EntryTooLarge(2, 1), False),
    ],
)
def test_only_a_final_refusal_removes_an_entry(tmp_path: Path, error: StoreError, stays: bool) -> None:
    made = idle(spool(tmp_path, FailingStore(error)))
    made.add(entry(), durable=False)
    made.run_once()
    assert (made.stats().entries == 1) is stays
    assert counted(made, "failures") == {f"remote.{error.kind}": 1}
    assert counted(made, "not_published") == ({} if stays else {error.kind: 1})


def test_the_end_of_a_job_does_not_wait_for_a_dead_remote(tmp_path: Path) -> None:
    made = idle(spool(tmp_path, FailingStore(StoreUnavailable("away", FailureKind.CONNECT))))
    made.add(entry(), durable=True)
    started = time.monotonic()
    assert made.drain(60).entries == 1
    assert time.monotonic() - started < 10


def test_the_end_of_a_job_does_not_wait_for_another_process_that_was_stopped(tmp_path: Path) -> None:
    remote = MemoryStore(limit_bytes=1 << 20)
    made, one, two = idle(spool(tmp_path, remote)), entry("one"), entry("two")
    for added in (one, two):
        made.add(added, durable=True)
    with (tmp_path / "spool" / one.key).open("rb") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        started = time.monotonic()
        assert made.drain(60).entries == 1
        assert time.monotonic() - started < 10
    assert remote.contains(two.key)


@pytest.mark.parametrize("uploads_already", [False, True])
def test_the_end_of_a_job_does_not_wait_for_an_upload_that_hangs(tmp_path: Path, uploads_already: bool) -> None:
    hangs, ends = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
            hangs.set()
            assert ends.wait(60)
            return super().put(entry, attestation)

    made = spool(tmp_path, Hanging(limit_bytes=1 << 20))
    if not uploads_already:
        idle(made)
    made.add(entry(), durable=True)
    assert not uploads_already or hangs.wait(30)
    started = time.monotonic()
    assert made.drain(0.5).entries == 1
    assert time.monotonic() - started < 10
    assert hangs.is_set()
    ends.set()
    made.close()


def test_the_end_of_a_job_outlasts_a_short_absence(tmp_path: Path) -> None:
    class Restarting(MemoryStore):
        asked = 0

        def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
            self.asked += 1
            if self.asked < 3:
                raise StoreUnavailable("away", FailureKind.CONNECT)
            return super().put(entry, attestation)

    made = idle(spool(tmp_path, Restarting(limit_bytes=1 << 20)))
    made.add(entry(), durable=True)
    assert made.drain(60).entries == 0


def test_a_remote_that_is_away_is_asked_once_a_round(tmp_path: Path) -> None:
    away = FailingStore(StoreUnavailable("away", FailureKind.CONNECT))
    made = idle(spool(tmp_path, away))
    for name in ("one", "two", "three"):
        made.add(entry(name), durable=False)
    made.run_once()
    assert away.asked == 1


def test_the_most_compile_seconds_per_byte_go_first(tmp_path: Path) -> None:
    order: list[str] = []

    class Recording(MemoryStore):
        def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
            order.append(entry.header.components[0].shown)
            return super().put(entry, attestation)

    made = idle(spool(tmp_path, Recording(limit_bytes=1 << 20)))
    made.add(entry("cheap", compile_seconds=1), durable=False)
    made.add(entry("worth most", compile_seconds=100), durable=False)
    made.add(entry("large", compile_seconds=100, size=100_000), durable=False)
    made.run_once()
    assert order[0] == "worth most"


def test_an_entry_that_never_gets_through_starves_no_other(tmp_path: Path) -> None:
    class Choking(MemoryStore):
        def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
            if entry.header.components[0].shown == "worth most":
                raise StoreUnavailable("took too long", FailureKind.TIMEOUT)
            return super().put(entry, attestation)

    remote = Choking(limit_bytes=1 << 20)
    made, other = idle(spool(tmp_path, remote)), entry("other")
    made.add(entry("worth most", compile_seconds=100), durable=False)
    made.add(other, durable=False)
    for _ in range(2):
        made.run_once()
    assert remote.contains(other.key)


def test_a_full_spool_takes_no_more_and_says_so(tmp_path: Path) -> None:
    made = idle(spool(tmp_path, MemoryStore(limit_bytes=1 << 20), limit_bytes=2000))
    assert made.add(entry("one"), durable=False)
    assert not made.add(entry("two"), durable=False)
    assert counted(made, "not_published") == {"spool_full": 1}


def test_a_folder_that_cannot_be_written_costs_the_upload_only(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    made = idle(spool(tmp_path, MemoryStore(limit_bytes=1 << 20)))
    assert not made.add(entry(), durable=True)
    assert counted(made, "failures") == {"spool.io": 1}
    assert made.stats().entries == 0


@pytest.mark.parametrize("damage", ["cut", "flip", "other name", "empty"])
def test_a_damaged_file_is_never_sent_and_goes_away(tmp_path: Path, damage: str) -> None:
    remote = MemoryStore(limit_bytes=1 << 20)
    made, one = idle(spool(tmp_path, remote)), entry()
    made.add(one, durable=False)
    path = tmp_path / "spool" / one.key
    raw = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(raw[:-1])
        case "flip":
            raw[200] ^= 1
            path.write_bytes(raw)
        case "other name":
            path.rename(path.parent / entry("two").key)
        case "empty":
            path.write_bytes(b"")
    made.run_once()
    assert remote.stats().entries == 0
    assert made.stats().entries == 0
    assert counted(made, "failures") == {"spool.corrupt": 1}


def test_what_the_remote_does_not_have_is_offered_once_a_day(tmp_path: Path) -> None:
    clock = ManualClock(time.time())
    remote = MemoryStore(limit_bytes=1 << 20)
    made = idle(Spool(tmp_path / "spool", remote, Counters(), limit_bytes=1 << 20, clock=clock))
    one = entry()
    assert made.wants(one)
    made.add(one, durable=False)
    assert not made.wants(one), "it waits already"
    made.run_once()
    assert remote.contains(one.key)
    assert not made.wants(one)
    remote.delete(one.key)
    clock.advance(86_401)
    assert made.wants(one)
    made.add(one, durable=False)
    made.run_once()
    assert remote.contains(one.key)
    clock.advance(86_401)
    made.resume()
    assert list((tmp_path / "spool" / "sent").iterdir()) == []


def test_a_cheap_program_is_not_offered(tmp_path: Path) -> None:
    made = idle(spool(tmp_path, MemoryStore(limit_bytes=1 << 20)))
    assert not made.wants(entry(compile_seconds=0.001))


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    made = idle(spool(tmp_path, MemoryStore(limit_bytes=1 << 20)))
    made.add(entry(), durable=False)
    foreign = tmp_path / "spool" / "notes.txt"
    foreign.write_text("mine")
    made.run_once()
    assert foreign.read_text() == "mine"


def test_an_entry_that_another_process_is_sending_is_left_to_it(tmp_path: Path) -> None:
    remote = MemoryStore(limit_bytes=1 << 20)
    made, one = idle(spool(tmp_path, remote)), entry()
    made.add(one, durable=False)
    with (tmp_path / "spool" / one.key).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert made.run_once() == 1
        assert not remote.contains(one.key)
    assert made.run_once() == 0
    assert remote.contains(one.key)


def test_a_child_that_was_forked_during_an_upload_does_not_hold_up_the_next(tmp_path: Path) -> None:
    made, one = idle(spool(tmp_path, remote := ForkingStore(StoreFull("made to fail")))), entry()
    made.add(one, durable=False)
    try:
        assert made.run_once() == 1
        with (tmp_path / "spool" / one.key).open("rb") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        if remote.child is not None:
            os.kill(remote.child, signal.SIGKILL)
            os.waitpid(remote.child, 0)


def test_temporary_files_of_the_dead_are_collected_by_age(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    old, new = folder / ".x.1.2.tmp", folder / ".y.1.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    spool(tmp_path, MemoryStore(limit_bytes=1 << 20)).resume()
    assert not old.exists()
    assert new.exists()


def test_remotes_and_namespaces_do_not_share_a_folder(tmp_path: Path) -> None:
    folders = {
        spool_folder(tmp_path, url, Namespace(name)) for url in ("http://a", "http://b") for name in ("one", "two")
    }
    assert len(folders) == 4


NAME = f"ttc1-{'a' * 64}"


def long_and_empty(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no entry"),
        long_and_empty,
    ],
    ids=["pipe", "folder", "loop", "device", "empty", "text", "terabyte"],
)
def test_what_is_no_entry_holds_nothing_up(tmp_path: Path, make: Callable[[Path], object]) -> None:
    remote = MemoryStore(limit_bytes=1 << 20)
    made, one = idle(spool(tmp_path, remote, limit_bytes=1 << 50)), entry()
    (tmp_path / "spool").mkdir()
    make(tmp_path / "spool" / NAME)
    assert made.add(one, durable=True)
    started = time.monotonic()
    assert made.drain(10).entries == 0
    assert time.monotonic() - started < 5
    assert remote.contains(one.key)


def test_an_upload_removes_no_file_that_came_meanwhile(tmp_path: Path) -> None:
    one = entry()
    fresh = tmp_path / "fresh"

    class Replacing(MemoryStore):
        def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
            outcome = super().put(entry, attestation)
            fresh.write_bytes(one.buffer)
            fresh.rename(tmp_path / "spool" / one.key)
            return outcome

    made = idle(spool(tmp_path, Replacing(limit_bytes=1 << 20)))
    made.add(one, durable=True)
    assert made.run_once() == 0
    assert made.stats().entries == 1
    assert made.run_once() == 0


def test_a_file_system_without_locks_uploads_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    remote = MemoryStore(limit_bytes=1 << 20)
    made, one = idle(spool(tmp_path, remote)), entry()
    made.add(one, durable=True)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert made.run_once() == 0
    assert remote.contains(one.key)


def test_a_job_that_runs_for_weeks_keeps_no_word_of_what_it_sent(tmp_path: Path) -> None:
    clock, away = ManualClock(), FailingStore(StoreUnavailable("away", FailureKind.IO))
    made = idle(Spool(tmp_path / "spool", away, Counters(), limit_bytes=1 << 20, clock=clock))
    made.resume()
    abandoned = tmp_path / "spool" / ".dead.1.tmp"
    for day in range(3):
        made.add(entry(f"of day {day}"), durable=True)
        assert made.run_once() == 1
        made._remote = MemoryStore(limit_bytes=1 << 20)
        abandoned.touch()
        clock.advance(86_500)
        assert made.run_once() == 0
        assert not abandoned.exists()
        assert len(list((tmp_path / "spool" / "sent").iterdir())) == 1
        made._remote = away
    made.run_once()
    assert not made._failed
