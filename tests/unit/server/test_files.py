"""The bucket in a folder."""

from __future__ import annotations

import errno
import math
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.faultybucket import FaultyBucketFiles
from torchtpu_cache_core.errors import InvalidName, StoreError, StoreFull, StoreRefused
from torchtpu_cache_core.names import Digest, Key, Namespace
from torchtpu_cache_core.testing.faults import Fault
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.blobs.layout import (
    BLOBS,
    ObjectName,
    blob_name,
    manifest_name,
    parse_blob,
    parse_generation,
    tombstone_name,
)

_DIGEST = Digest("ab" * 32)
_KEY = Key("ttc1-" + "0" * 64)
_NAME = ObjectName("entries/default/x/1")


@pytest.fixture
def bucket(tmp_path: Path) -> FileBucket:
    return FileBucket(tmp_path / "bucket")


@pytest.mark.parametrize(
    "name", ["", "a", "/a/b", "a//b", "a/../b", "a/.b", "a/b/", "a/B", "a/b\n", "a/\x00", "a/b\\c", "a/" + "b" * 200]
)
def test_names_that_no_object_has(name: str) -> None:
    with pytest.raises(InvalidName):
        ObjectName(name)


def test_names_and_back() -> None:
    assert parse_blob(blob_name(_DIGEST)) == _DIGEST
    assert parse_blob(BLOBS + "xyz") is None
    assert parse_blob("entries/x") is None
    for name, dead in (
        (manifest_name(Namespace("n"), _KEY, 12), False),
        (tombstone_name(Namespace("n"), _KEY, 12), True),
    ):
        found = parse_generation(name)
        assert found is not None
        assert (found.namespace, found.key, found.number, found.dead) == ("n", _KEY, 12, dead)


@pytest.mark.parametrize("last", ["0", "01", "x", "1.dying", "1.dead.dead", "-1", "1" * 20, ".dead"])
def test_what_is_no_generation(last: str) -> None:
    assert parse_generation(f"entries/n/{_KEY}/{last}") is None
    assert parse_generation(f"entries/N/{_KEY}/1") is None
    assert parse_generation("entries/n/key/1") is None


def test_an_object_is_created_once(bucket: FileBucket) -> None:
    assert bucket.open(_NAME) is None
    assert bucket.head(_NAME) is None
    assert not bucket.delete(_NAME)
    assert not bucket.refresh(_NAME)
    assert bucket.create_bytes(_NAME, b"first")
    assert not bucket.create_bytes(_NAME, b"second")
    assert bucket.read(_NAME, 100) == b"first"
    found = bucket.head(_NAME)
    assert found is not None
    assert (found.name, found.size_bytes) == (_NAME, 5)
    assert [info.name for info in bucket.list("entries/")] == [_NAME]
    assert bucket.url(_NAME, 60.0) is None


def test_of_many_creates_one_wins(bucket: FileBucket) -> None:
    start = threading.Barrier(8)

    def create(i: int) -> bool:
        with bucket.stage(_NAME) as staged:
            staged.write(b"%d" % i * 1000)
            start.wait()
            return bucket.create(staged)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert bucket.read(_NAME, 10_000) == b"%d" % won.index(True) * 1000


def test_a_staged_object_can_be_created_again(bucket: FileBucket) -> None:
    with bucket.stage(_NAME) as staged:
        staged.write(b"x")
        assert bucket.create(staged)
        assert bucket.delete(_NAME)
        assert bucket.create(staged)
    staged.discard()
    assert bucket.read(_NAME, 10) == b"x"


def test_what_is_open_outlives_a_delete(bucket: FileBucket) -> None:
    bucket.create_bytes(_NAME, b"content")
    found = bucket.open(_NAME)
    assert found is not None
    with found:
        assert bucket.delete(_NAME)
        assert found.read_at(3, 100) == b"tent"
        assert found.read_at(7, 1) == b""
    with pytest.raises(ValueError, match="closed"):
        found.read_at(0, 1)


def test_the_identity_tells_a_change(bucket: FileBucket) -> None:
    bucket.create_bytes(_NAME, b"content")

    def identity() -> object:
        found = bucket.open(_NAME)
        assert found is not None
        with found:
            return found.identity

    first = identity()
    assert identity() == first
    bucket.path(_NAME).write_bytes(b"CONTENT")
    assert identity() != first


def test_refreshing_makes_young(bucket: FileBucket) -> None:
    bucket.create_bytes(_NAME, b"x")
    os.utime(bucket.path(_NAME), (1, 1))
    assert bucket.refresh(_NAME)
    found = bucket.head(_NAME)
    assert found is not None
    assert found.modified_seconds > time.time() - 100


def test_blobs_lie_in_two_digit_folders_and_list_plainly(bucket: FileBucket) -> None:
    bucket.create_bytes(blob_name(_DIGEST), b"x")
    assert bucket.path(blob_name(_DIGEST)).parent.name == "ab"
    stray = bucket.path(blob_name(_DIGEST)).parent.parent / "cd" / _DIGEST
    stray.parent.mkdir()
    stray.write_bytes(b"in the wrong folder")
    assert [info.name for info in bucket.list(BLOBS)] == [blob_name(_DIGEST)]


@pytest.mark.parametrize("kind", ["folder", "symlink", "dangling", "socket", "fifo"])
def test_what_is_foreign_is_neither_served_nor_touched(bucket: FileBucket, tmp_path: Path, kind: str) -> None:
    path = bucket.path(_NAME)
    path.parent.mkdir(parents=True)
    target = tmp_path / "target"
    target.write_text("precious")
    match kind:
        case "folder":
            path.mkdir()
        case "symlink":
            path.symlink_to(target)
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "socket":
            server = socket.socket(socket.AF_UNIX)
            os.chdir(path.parent)
            server.bind(path.name)
            server.close()
        case "fifo":
            os.mkfifo(path)
    before = path.lstat()
    assert bucket.open(_NAME) is None
    assert bucket.head(_NAME) is None
    assert not bucket.create_bytes(_NAME, b"x")
    assert not bucket.delete(_NAME)
    assert not bucket.refresh(_NAME)
    assert list(bucket.list("entries/")) == []
    assert path.lstat() == before
    assert bucket.set_aside(_NAME)
    assert not bucket.set_aside(_NAME)
    assert bucket.create_bytes(_NAME, b"x")
    assert bucket.read(_NAME, 2) == b"x"
    [kept] = (tmp_path / "bucket" / "quarantine").iterdir()
    assert kept.lstat().st_ino == before.st_ino
    assert target.read_text() == "precious"


def test_a_probe_that_a_dead_process_left_goes_too(bucket: FileBucket) -> None:
    probe, foreign = bucket.path(ObjectName("probes/0123456789abcdef-0")), bucket.path(ObjectName("probes/foreign"))
    probe.parent.mkdir()
    probe.touch()
    foreign.touch()
    bucket.create_bytes(_NAME, b"kept")
    assert bucket.collect_leftovers(math.inf) == 1
    assert not probe.exists()
    assert foreign.exists()
    assert bucket.head(_NAME) is not None


def test_leftovers_of_the_dead_go_by_age(bucket: FileBucket) -> None:
    bucket.create_bytes(_NAME, b"x")
    folder = bucket.path(_NAME).parent
    old, young, foreign = folder / ".writing-dead-1", folder / ".writing-dead-2", folder / ".other"
    for path in (old, young, foreign):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    os.utime(foreign, (1, 1))
    with bucket.stage(ObjectName("entries/default/x/2")) as staged:
        assert bucket.collect_leftovers(time.time() - 1000) == 1
        assert bucket.collect_leftovers(time.time() + 1000) == 1
        assert bucket.create(staged)
    assert foreign.exists()
    assert not old.exists()
    assert not young.exists()


def test_quarantine_is_bounded(bucket: FileBucket, tmp_path: Path) -> None:
    for i in range(40):
        bucket.create_bytes(_NAME, b"%d" % i)
        assert bucket.set_aside(_NAME)
    kept = list((tmp_path / "bucket" / "quarantine").iterdir())
    assert len(kept) == 32
    assert {path.read_bytes() for path in kept} >= {b"39", b"30"}


def test_quarantine_is_bounded_in_bytes(bucket: FileBucket, tmp_path: Path) -> None:
    def set_aside(megabytes: int) -> list[int]:
        bucket.create_bytes(_NAME, b"")
        os.truncate(bucket.path(_NAME), megabytes << 20)
        assert bucket.set_aside(_NAME)
        return sorted(path.stat().st_size >> 20 for path in (tmp_path / "bucket" / "quarantine").iterdir())

    assert [set_aside(size) for size in (100, 90, 80)] == [[100], [90, 100], [80, 90]]
    assert set_aside(300) == [], "what is over the bound by itself is kept no more than what came before it"
    assert set_aside(1) == [1]


def test_probe(bucket: FileBucket) -> None:
    bucket.probe()
    assert list(bucket.list("probes/")) == []


@pytest.mark.parametrize(
    ("call", "error", "kind"),
    [("write", errno.ENOSPC, StoreFull), ("fsync", errno.EIO, StoreError), ("link", errno.EPERM, StoreRefused)],
)
def test_a_probe_that_fails(tmp_path: Path, call: str, error: int, kind: type[StoreError]) -> None:
    files = FaultyBucketFiles()
    bucket = FileBucket(tmp_path, files=files)
    with files.failing(Fault(call=call, error=error)), pytest.raises(kind):
        bucket.probe()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("call", ["open", "write", "fsync", "link", "mkdir", "lstat", "scandir", "unlink", "read"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.ESTALE, errno.ENAMETOOLONG])
def test_no_call_fails_under_another_name(tmp_path: Path, call: str, error: int) -> None:
    """Whatever the kernel answers, only a StoreError leaves."""
    files = FaultyBucketFiles()
    bucket = FileBucket(tmp_path, files=files)
    bucket.create_bytes(_NAME, b"there")
    steps = [
        lambda: bucket.create_bytes(ObjectName("entries/default/y/1"), b"x"),
        lambda: bucket.read(_NAME, 10),
        lambda: bucket.head(_NAME),
        lambda: list(bucket.list("entries/")),
        lambda: bucket.refresh(_NAME),
        lambda: bucket.set_aside(_NAME),
        lambda: bucket.delete(_NAME),
        bucket.space,
    ]
    failures = 0
    with files.failing(Fault(call=call, error=error)):
        for step in steps:
            try:
                step()
            except StoreError:
                failures += 1
    assert failures or call == "unlink"
    assert files.hits[call]
