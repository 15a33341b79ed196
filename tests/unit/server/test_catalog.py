"""What is published under which key, also when any single call of the operating system fails or is the last one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faultybucket import FaultyBucketFiles
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, EntryTooLarge, StoreError, StoreFull, StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Namespace
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for, rival_of
from torchtpu_cache_core.testing.faults import Fault
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.blobs.files import BucketFiles, FileBucket
from torchtpu_cache_server.blobs.layout import blob_name, manifest_name, tombstone_name
from torchtpu_cache_server.incoming import Incoming
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.upkeep import UNUSED_BLOB_SECONDS, Upkeep, collect, reconcile

_ENTRY = entry_for("catalogued")
_NAME = (DEFAULT_NAMESPACE, _ENTRY.key)
_OTHER = Namespace("other")


def _open(place: Path, files: BucketFiles | None = None, **limits: int) -> Service:
    return Service(
        FileBucket(place, files=files or BucketFiles()),
        SqliteIndex(place / "index.sqlite"),
        limits=Limits(**{"min_free_bytes": 0} | limits),
        clock=ManualClock(),
    )


def _read(service: Service, namespace: Namespace = DEFAULT_NAMESPACE) -> bytes | None:
    found = service.open(namespace, _ENTRY.key)
    if found is None:
        return None
    with found.blob:
        return found.blob.read_at(0, found.manifest.size_bytes)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with _open(tmp_path / "data") as opened:
        assert reconcile(opened)
        yield opened


def _files(service: Service) -> set[str]:
    return {info.name for prefix in ("blobs/sha256/", "entries/") for info in service.bucket.list(prefix)}


def test_generations_grow_and_one_tombstone_stays(service: Service) -> None:
    for generation in (1, 2, 3):
        status, manifest = service.put(DEFAULT_NAMESPACE, _ENTRY)
        assert (status, manifest.generation) == (PutStatus.CREATED, generation)
        assert _files(service) >= {manifest_name(*_NAME, generation), blob_name(_ENTRY.digest)}
        assert service.delete(*_NAME)
        assert _files(service) == {tombstone_name(*_NAME, generation)}
        assert _read(service) is None


def test_an_old_manifest_cannot_come_back(service: Service) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    old = service.bucket.read(manifest_name(*_NAME, 1), 5000)
    assert old is not None
    service.delete(*_NAME)
    assert service.bucket.create_bytes(manifest_name(*_NAME, 1), old)
    blob = bytes(_ENTRY.buffer)
    assert service.bucket.create_bytes(blob_name(_ENTRY.digest), blob)
    assert _read(service) is None
    assert service.put(DEFAULT_NAMESPACE, rival_of(_ENTRY))[1].generation == 2


def test_a_blob_goes_with_its_last_manifest(service: Service) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    service.put(_OTHER, _ENTRY)
    service.delete(*_NAME)
    assert _read(service, _OTHER) == bytes(_ENTRY.buffer)
    service.delete(_OTHER, _ENTRY.key)
    assert service.bucket.head(blob_name(_ENTRY.digest)) is None


def test_an_index_in_doubt_costs_no_blob_and_serves_nothing_closed(service: Service) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    service.put(_OTHER, _ENTRY)
    service.index.remove(_OTHER, _ENTRY.key)
    service.catalog.doubt_index(StoreUnavailable("lost"))
    service.delete(*_NAME)
    assert _read(service, _OTHER) == bytes(_ENTRY.buffer)
    assert reconcile(service)
    assert service.index.references(_ENTRY.digest) == 1


def test_reconciling_drops_and_adds(service: Service) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    service.put(_OTHER, _ENTRY)
    service.bucket.create_bytes(tombstone_name(*_NAME, 1), b"{}")
    service.index.remove(_OTHER, _ENTRY.key)
    service.index.set_complete(False)
    assert reconcile(service)
    assert service.index.lookup(*_NAME) is None
    assert service.index.lookup(_OTHER, _ENTRY.key) is not None
    assert service.index.complete


@pytest.mark.parametrize("later", ["a start", "a put"])
def test_what_a_killed_close_left_goes(service: Service, later: str) -> None:
    """It made its tombstone, and died before it could remove the manifest and the tombstone before."""
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    service.delete(*_NAME)
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    service.bucket.create_bytes(tombstone_name(*_NAME, 2), b"{}")
    service.index.set_complete(False)
    if later == "a start":
        reconcile(service)
        assert _files(service) == {tombstone_name(*_NAME, 2), blob_name(_ENTRY.digest)}
    else:
        service.put(DEFAULT_NAMESPACE, _ENTRY)
        assert _files(service) == {tombstone_name(*_NAME, 2), manifest_name(*_NAME, 3), blob_name(_ENTRY.digest)}


@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[" * 5000, b"\xff" * 5000])
def test_a_bad_manifest_is_closed(service: Service, content: bytes) -> None:
    service.bucket.create_bytes(manifest_name(*_NAME, 1), content)
    with pytest.raises(CorruptEntry):
        _read(service)
    assert _read(service) is None
    assert service.put(DEFAULT_NAMESPACE, _ENTRY)[1].generation == 2


def test_a_manifest_of_another_key_is_closed(service: Service) -> None:
    other = entry_for("another")
    service.put(DEFAULT_NAMESPACE, other)
    raw = service.bucket.read(manifest_name(DEFAULT_NAMESPACE, other.key, 1), 5000)
    assert raw is not None
    service.bucket.create_bytes(manifest_name(*_NAME, 1), raw)
    with pytest.raises(CorruptEntry):
        _read(service)
    assert service.find(DEFAULT_NAMESPACE, other.key) is not None


def test_what_a_look_up_has_closed_is_not_read_from_memory(service: Service) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    assert _read(service) == bytes(_ENTRY.buffer)
    service.bucket.path(manifest_name(*_NAME, 1)).write_bytes(b"damaged")  # type: ignore[attr-defined]
    service.index.set_complete(False)
    assert service.lookup(DEFAULT_NAMESPACE, [_ENTRY.key]) == {}
    assert service.open_hot(*_NAME) is None
    assert _read(service) is None


def test_something_foreign_in_a_manifests_place_is_passed_over(service: Service) -> None:
    path = service.bucket.path(manifest_name(*_NAME, 1))  # type: ignore[attr-defined]
    path.mkdir(parents=True)
    assert service.put(DEFAULT_NAMESPACE, _ENTRY)[1].generation == 2
    assert _read(service) == bytes(_ENTRY.buffer)
    assert path.is_dir()


def test_something_foreign_in_a_blobs_place_is_set_aside(service: Service, tmp_path: Path) -> None:
    path = service.bucket.path(blob_name(_ENTRY.digest))  # type: ignore[attr-defined]
    path.mkdir(parents=True)
    (path / "theirs").write_bytes(b"precious")
    assert service.put(DEFAULT_NAMESPACE, _ENTRY)[0] is PutStatus.CREATED
    assert _read(service) == bytes(_ENTRY.buffer)
    [kept] = (tmp_path / "data" / "quarantine").iterdir()
    assert (kept / "theirs").read_bytes() == b"precious"


def test_an_unused_blob_goes_after_a_day_and_a_used_one_stays(service: Service) -> None:
    clock = service.clock
    assert isinstance(clock, ManualClock)
    lone = entry_for("lone")
    service.bucket.create_bytes(blob_name(lone.digest), bytes(lone.buffer))
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    clock.advance(UNUSED_BLOB_SECONDS - 3600)
    assert collect(service) == 0
    clock.advance(7200)
    service.index.set_complete(False)
    assert collect(service) == 0
    service.index.set_complete(True)
    assert collect(service) == 1
    assert service.bucket.head(blob_name(lone.digest)) is None
    assert _read(service) == bytes(_ENTRY.buffer)


@pytest.mark.parametrize("times", [1, None])
@pytest.mark.parametrize("act", ["put", "delete", "replace"])
def test_any_call_may_fail(tmp_path: Path, act: str, times: int | None) -> None:
    """Lets call after call of the file system fail, and looks at what a service started after that would see.

    Once a call fails alone, once with all of its kind after it.
    """
    pristine = tmp_path / "pristine"
    with _open(pristine) as service:
        if act != "put":
            service.put(DEFAULT_NAMESPACE, _ENTRY)
        assert reconcile(service)
    rival = rival_of(_ENTRY)
    calls = ("open", "write", "fsync", "link", "unlink", "rename", "mkdir", "lstat", "scandir", "utime", "read")
    crashed = 0
    for call in calls:
        for skip in range(60):
            place = tmp_path / "trial"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(pristine, place)
            files = FaultyBucketFiles()
            acknowledged, hit = False, False
            service = _open(place, files)
            try:
                with files.failing(Fault(call=call, error=errno.EIO, skip=skip, times=times)):
                    try:
                        if act == "put":
                            acknowledged = service.put(DEFAULT_NAMESPACE, _ENTRY)[0] is PutStatus.CREATED
                        elif act == "delete":
                            acknowledged = service.delete(*_NAME)
                        else:
                            service.delete(*_NAME)
                            acknowledged = service.put(DEFAULT_NAMESPACE, rival)[0] is PutStatus.CREATED
                    except StoreError:
                        pass
                hit = bool(files.hits)
            finally:
                service.close()
            crashed += hit
            with _open(place) as after:
                try:
                    seen = _read(after)
                except CorruptEntry:
                    seen = _read(after)
                    assert seen is None
                allowed = {"put": (None, _ENTRY), "delete": (_ENTRY, None), "replace": (_ENTRY, None, rival)}[act]
                assert seen in [entry and bytes(entry.buffer) for entry in allowed]
                if acknowledged:
                    assert seen == (allowed[-1] and bytes(allowed[-1].buffer))
                assert reconcile(after)
                assert _read(after) == seen
                assert {info.key for info in after.page(DEFAULT_NAMESPACE, limit=9).entries} == (
                    {_ENTRY.key} if seen else set()
                )
                assert after.put(DEFAULT_NAMESPACE, _ENTRY)[0] in (
                    (PutStatus.CREATED,) if seen is None else (PutStatus.SAME, PutStatus.CONFLICT)
                )
            if not hit:
                break
    assert crashed > 10


def test_room_is_made_and_bounded(tmp_path: Path) -> None:
    evicted = []
    with _open(tmp_path / "data", limit_entries=3) as service:
        service._evicted = lambda: evicted.append(1)
        assert reconcile(service)
        for i in range(10):
            service.put(DEFAULT_NAMESPACE, entry_for(f"room {i}"))
        assert service.stats().entries == 3
        assert len(evicted) == 7


def test_what_a_reconciliation_finds_bad_is_closed_and_counted(tmp_path: Path) -> None:
    with _open(tmp_path / "data") as service:
        service.put(DEFAULT_NAMESPACE, _ENTRY)
        service.put(DEFAULT_NAMESPACE, entry_for("sound"))
    (tmp_path / "data" / manifest_name(*_NAME, 1)).write_bytes(b"no manifest")
    counted: list[None] = []
    bucket, index = FileBucket(tmp_path / "data"), SqliteIndex(tmp_path / "data" / "index.sqlite")
    with Service(bucket, index, clock=ManualClock(), condemned=lambda: counted.append(None)) as service:
        assert reconcile(service)
        assert len(counted) == 1
        assert _read(service) is None
        assert service.stats().entries == 1
        service.put(DEFAULT_NAMESPACE, _ENTRY)
        assert reconcile(service)
        assert len(counted) == 1
        assert _read(service) == bytes(_ENTRY.buffer)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_what_is_no_file_gives_its_place_to_the_next_put(service: Service, tmp_path: Path, kind: str) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    assert isinstance(service.bucket, FileBucket)
    path = service.bucket.path(blob_name(_ENTRY.digest))
    path.rename(tmp_path / "elsewhere")
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CorruptEntry):
        _read(service)
    assert _read(service) is None
    assert service.put(DEFAULT_NAMESPACE, _ENTRY)[0] is PutStatus.CREATED
    assert _read(service) == bytes(_ENTRY.buffer)


def _arriving(service: Service, entry: Entry) -> Incoming:
    return service.receive(DEFAULT_NAMESPACE, entry.key, entry.digest, entry.size_bytes)


def test_what_is_only_announced_evicts_nothing(tmp_path: Path) -> None:
    with _open(tmp_path / "data", limit_bytes=100_000) as service:
        assert reconcile(service)
        kept = [entry_for(f"kept {i}", size_bytes=20_000) for i in range(3)]
        for entry in kept:
            service.put(DEFAULT_NAMESPACE, entry)
        large = entry_for("large", size_bytes=60_000)
        with _arriving(service, large), _arriving(service, entry_for("never sent", size_bytes=90_000)):
            assert service.stats().entries == 3
        with _arriving(service, large) as incoming:
            incoming.feed(large.buffer[:9000])
            assert service.stats().entries == 3
            incoming.feed(large.buffer[9000:40_000])
            assert service.stats().entries == 2
            with pytest.raises(CorruptEntry):
                incoming.commit()
        service.put(DEFAULT_NAMESPACE, entry_for("kept 4", size_bytes=20_000))
        assert service.stats().entries == 3  # what the broken one had taken is given back


def test_what_arrives_at_once_keeps_the_limit_together(tmp_path: Path) -> None:
    with _open(tmp_path / "data", limit_entries=2) as service:
        assert reconcile(service)
        entries = [entry_for(f"at once {i}") for i in range(4)]
        with contextlib.ExitStack() as stack:
            arriving = [stack.enter_context(_arriving(service, entry)) for entry in entries]
            for incoming, entry in zip(arriving, entries, strict=True):
                incoming.feed(entry.buffer)
            for number, incoming in enumerate(arriving):
                if number < 2:
                    assert incoming.commit()[0] is PutStatus.CREATED
                    incoming.close()
            assert service.stats().entries == 2
            assert arriving[2].commit()[0] is PutStatus.CREATED
            assert service.stats().entries == 2


def test_nothing_is_received_that_could_not_stay(tmp_path: Path) -> None:
    with _open(tmp_path / "data", limit_entries=1) as service:
        assert reconcile(service)
        with _arriving(service, _ENTRY) as incoming:
            incoming.feed(_ENTRY.buffer)
            incoming.commit()
            service.delete(*_NAME)
            with pytest.raises(StoreFull):
                _arriving(service, entry_for("one too many"))


def test_no_room_while_the_index_is_in_doubt(tmp_path: Path) -> None:
    with _open(tmp_path / "data", limit_entries=1) as service:
        service.put(DEFAULT_NAMESPACE, _ENTRY)
        with pytest.raises(StoreUnavailable):
            service.put(DEFAULT_NAMESPACE, entry_for("second"))
        assert reconcile(service)
        assert service.put(DEFAULT_NAMESPACE, entry_for("second"))[0] is PutStatus.CREATED


def test_too_large_names_its_limit(tmp_path: Path) -> None:
    with _open(tmp_path / "data", max_entry_bytes=1000) as service:
        with pytest.raises(EntryTooLarge) as caught:
            service.put(DEFAULT_NAMESPACE, _ENTRY)
        assert caught.value.limit_bytes == 1000


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path: Path) -> None:
    """However young: a service that dies every few minutes must not fill its disk with halves of uploads."""
    place = tmp_path / "data"
    with _open(place) as service:
        service.put(DEFAULT_NAMESPACE, _ENTRY)
    with _open(place) as service:
        half = service.bucket.path(blob_name(_ENTRY.digest)).with_name(".writing-0123-4")  # type: ignore[attr-defined]
        half.touch()
        upkeep = Upkeep(service)
        with service.bucket.stage(blob_name(_ENTRY.digest)):
            own = set(half.parent.glob(".writing-*")) - {half}
            upkeep.run_once()
            assert set(half.parent.glob(".writing-*")) == own
        half.touch()
        service.index.set_complete(False)
        upkeep.run_once()
        assert half.exists()  # by age from now on


def test_bad_bytes_that_a_put_has_replaced_meanwhile_are_not_set_aside(service: Service) -> None:
    service.put(DEFAULT_NAMESPACE, _ENTRY)
    path = service.bucket.path(blob_name(_ENTRY.digest))  # type: ignore[attr-defined]
    path.write_bytes(bytes(path.stat().st_size))
    record = service.find(*_NAME)
    assert record is not None
    with service.catalog.blob_of(record.manifest) as blob, pytest.raises(CorruptEntry) as caught:
        service.catalog.verify(record, blob)
    assert service.put(_OTHER, _ENTRY)[0] is PutStatus.CREATED
    assert service.catalog.condemn(record, caught.value)
    assert _read(service, _OTHER) == bytes(_ENTRY.buffer)


def test_a_round_of_upkeep_mends_the_index_and_a_bad_one_ends_nothing(tmp_path: Path) -> None:
    files = FaultyBucketFiles()
    with _open(tmp_path / "data", files) as service:
        service.put(DEFAULT_NAMESPACE, _ENTRY)
        upkeep = Upkeep(service, interval_seconds=0.01)
        with files.failing(Fault(call="scandir", error=errno.EIO)):
            with pytest.raises(StoreError):
                upkeep.run_once()
            upkeep.start()
            while not files.hits.get("scandir", 0) > 3:
                pass
        upkeep.stop()
        upkeep.run_once()
        assert service.index.complete


def test_a_large_entry_finds_room_among_many_small_ones(tmp_path: Path) -> None:
    with _open(tmp_path / "data", limit_bytes=200 * 8192) as service:
        assert reconcile(service)
        for i in range(200):
            service.put(DEFAULT_NAMESPACE, entry_for(f"small {i}", size_bytes=100, compile_seconds=0.0))
        assert service.stats().entries == 200
        large = entry_for("large", size_bytes=150 * 8192)
        assert service.put(DEFAULT_NAMESPACE, large)[0] is PutStatus.CREATED
        assert 45 <= service.stats().entries <= 51
