"""Room kept back on the data folder's disk, and how a service starts on a disk that is full or read-only."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from support.faultybucket import FaultyBucketFiles
from torchtpu_cache_core.errors import FailureKind, StoreFull, StoreRefused, StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_core.testing.faults import Fault
from torchtpu_cache_server import serving
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.blobs.reserve import RESERVED_FILE_BYTES, RESERVED_FILES, Reserve
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.problems import refusal_of
from torchtpu_cache_server.service import Service

WELL = (1 << 30, 100_000)


class Disk(FaultyBucketFiles):
    """Says of itself how many bytes and inodes are free."""

    def __init__(self, free: tuple[int, int] = WELL) -> None:
        super().__init__()
        self.free = free

    def statvfs(self, path: Path) -> os.statvfs_result:
        found = list(super().statvfs(path))
        found[1] = 1  # f_frsize
        found[4] = self.free[0]  # f_bavail
        found[5] = max(1, self.free[1])  # f_files
        found[7] = self.free[1]  # f_favail
        return os.statvfs_result(found)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "reserve"


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.iterdir()] if folder.is_dir() else []


def test_is_filled_with_real_bytes_once_and_again_after_it_was_given_up(folder: Path) -> None:
    disk = Disk()
    reserve = Reserve(folder, disk)
    assert reserve.fill()
    assert sizes(folder) == [RESERVED_FILE_BYTES] * RESERVED_FILES
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) >= RESERVED_FILES * RESERVED_FILE_BYTES
    calls = len(disk.calls)
    assert reserve.fill()
    assert len(disk.calls) == calls  # nothing to do
    disk.free = (0, 100_000)
    reserve.give_up_where_full()
    assert sizes(folder) == []
    assert not reserve.fill()
    disk.free = WELL
    assert reserve.fill()
    assert sizes(folder) == [RESERVED_FILE_BYTES] * RESERVED_FILES


@pytest.mark.parametrize("free", [WELL, (1 << 30, 0)], ids=["room", "a file system that counts no inodes"])
def test_is_kept_where_there_is_room(folder: Path, free: tuple[int, int]) -> None:
    class Uncounted(Disk):
        def statvfs(self, path: Path) -> os.statvfs_result:
            found = list(super().statvfs(path))
            found[5] = 0 if self.free[1] == 0 else found[5]
            return os.statvfs_result(found)

    disk = Uncounted()
    reserve = Reserve(folder, disk)
    reserve.fill()
    disk.free = free
    reserve.give_up_where_full()
    assert len(sizes(folder)) == RESERVED_FILES


@pytest.mark.parametrize("free", [(1000, 100_000), (1 << 30, 2)], ids=["no bytes", "no inodes"])
def test_is_given_up_where_there_is_none(folder: Path, free: tuple[int, int]) -> None:
    disk = Disk()
    Reserve(folder, disk).fill()
    disk.free = free
    Reserve(folder, disk).give_up_where_full()  # of an earlier process
    assert sizes(folder) == []


@pytest.mark.parametrize("call", ["statvfs", "mkdir", "open", "write", "unlink"])
@pytest.mark.parametrize("error", [errno.EROFS, errno.ENOSPC, errno.EIO])
def test_never_raises(folder: Path, call: str, error: int) -> None:
    disk = Disk()
    reserve = Reserve(folder, disk)
    with disk.failing(Fault(call=call, error=error)):
        reserve.fill()
        disk.free = (0, 0)
        reserve.give_up_where_full()
    disk.free = WELL
    assert reserve.fill()
    assert sizes(folder) == [RESERVED_FILE_BYTES] * RESERVED_FILES


def test_a_cut_file_of_it_is_made_whole(folder: Path) -> None:
    Reserve(folder, Disk()).fill()
    (folder / "3").write_bytes(b"cut")
    assert Reserve(folder, Disk()).fill()
    assert sizes(folder) == [RESERVED_FILE_BYTES] * RESERVED_FILES


class Filling(FileBucket):
    """Remembers whether way was made before an object was made."""

    made_way = 0

    def make_way(self) -> None:
        self.made_way += 1


def test_a_delete_makes_way_first(tmp_path: Path) -> None:
    bucket = Filling(tmp_path / "data")
    with Service(bucket, SqliteIndex(tmp_path / "index.sqlite")) as service:
        entry = entry_for("deleted")
        service.put(DEFAULT_NAMESPACE, entry)
        assert bucket.made_way == 0
        assert service.delete(DEFAULT_NAMESPACE, entry.key)
        assert bucket.made_way == 1


def test_a_read_only_disk_is_told_as_one_that_may_take_again() -> None:
    refusal = refusal_of(StoreRefused("an object could not be written", FailureKind.READ_ONLY), uploading=True)
    assert (refusal.problem.status, refusal.problem.kind) == (507, "read_only")


@pytest.mark.parametrize("error", [StoreFull("full"), StoreRefused("read-only", FailureKind.READ_ONLY)])
def test_a_service_starts_on_a_disk_that_takes_nothing(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(self: FileBucket) -> None:
        raise error

    monkeypatch.setattr(FileBucket, "probe", refused)
    with caplog.at_level(logging.WARNING):
        assert not serving.open_bucket(tmp_path / "data")[1]
    assert "what it holds is served" in caplog.text


def test_a_service_that_starts_well_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert serving.open_bucket(tmp_path / "data")[1]
    assert caplog.text == ""
    assert len(sizes(tmp_path / "data" / "reserve")) == RESERVED_FILES


def test_a_service_does_not_start_on_a_bucket_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: FileBucket) -> None:
        raise StoreUnavailable("does not give back what was written")

    monkeypatch.setattr(FileBucket, "probe", refused)
    with pytest.raises(StoreUnavailable):
        serving.open_bucket(tmp_path / "data")


def test_an_index_that_cannot_be_written_is_replaced_by_one_in_the_temp_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = tmp_path / "absent" / "index.sqlite"
    entry = entry_for("indexed elsewhere")
    with (
        caplog.at_level(logging.WARNING),
        serving.open_index(absent, or_elsewhere=True) as index,
        Service(FileBucket(tmp_path / "data"), index) as service,
    ):
        service.put(DEFAULT_NAMESPACE, entry)
        assert service.find(DEFAULT_NAMESPACE, entry.key) is not None
    assert "the index is in the temp folder" in caplog.text
    assert not absent.parent.exists()


def test_an_index_that_cannot_be_opened_stops_a_service_whose_disk_is_well(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable), serving.open_index(tmp_path / "absent" / "i.sqlite", or_elsewhere=False):
        pytest.fail("it opened")


def test_nothing_goes_for_what_would_not_fit_all_the_same(tmp_path: Path) -> None:
    """On a disk that others fill: a put evicts where that helps, and is refused where it would not."""
    disk = Disk()
    with Service(FileBucket(tmp_path / "data", files=disk), SqliteIndex(tmp_path / "index.sqlite")) as service:
        service.index.set_complete(True)
        held = [entry_for(f"held {i}", size_bytes=100_000) for i in range(5)]
        for entry in held:
            service.put(DEFAULT_NAMESPACE, entry)
        disk.free = (300_000, 100_000)
        with pytest.raises(StoreFull):
            service.put(DEFAULT_NAMESPACE, entry_for("much too large", size_bytes=10_000_000))
        assert service.stats().entries == len(held)
        disk.free = (0, 100_000)
        with pytest.raises(StoreFull):
            service.put(DEFAULT_NAMESPACE, entry_for("small", size_bytes=1000))
        assert service.stats().entries == len(held)
