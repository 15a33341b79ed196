"""What is left after the worst: a damaged index, a full disk, bytes that rot, a service with little memory."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.served import SERVE, Served, path_of
from support.waiting import wait_until
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.testing.entries import entry_for, rival_of


def _small(i: int) -> Entry:
    return entry_for(f"small {i}", size_bytes=3000)


@pytest.mark.parametrize("damage", ["garbage", "zeros", "cut", "gone", "middle", "folder"])
def test_a_damaged_index(start: Callable[..., Served], damage: str) -> None:
    entries = [_small(i) for i in range(20)]
    served = start()
    for entry in entries:
        served.put(entry)
    assert served.ask("DELETE", path_of(entries[0])).status == 204
    assert served.stop() == 0
    index = served.data_dir / "index.sqlite"
    raw = index.read_bytes()
    match damage:
        case "garbage":
            index.write_bytes(os.urandom(len(raw)))
        case "zeros":
            index.write_bytes(bytes(len(raw)))
        case "cut":
            index.write_bytes(raw[: len(raw) // 2])
        case "gone":
            index.unlink()
        case "middle":
            index.write_bytes(raw[:5000] + os.urandom(len(raw) - 5000))
        case "folder":
            index.unlink()
            index.mkdir()
            if start_refuses(served.data_dir):
                return
    again = start()
    for entry in entries[1:]:
        assert again.get(entry).body == bytes(entry.buffer)
    assert again.get(entries[0]).kind == "not_found"
    assert again.put(_small(100)).status == 201
    wait_until(lambda: len(_listed(again)) == 20, "the index is not rebuilt")
    assert again.ask("GET", "/readyz").status == 200


def _listed(served: Served) -> list[dict[str, object]]:
    answer = served.ask("GET", "/v1/default/entries?limit=1000")
    # While damage is being found out, a listing may fail; it never lies.
    return answer.json["entries"] if answer.status == 200 else []


def start_refuses(data_dir: Path) -> bool:
    """A folder in the index's place is nobody's damage but a person's: it is refused in one sentence."""
    command = [*SERVE, "--listen", ":0", "--data-dir", str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1


def test_an_index_damaged_while_it_serves(start: Callable[..., Served]) -> None:
    entries = [_small(i) for i in range(10)]
    served = start()
    for entry in entries:
        served.put(entry)
    for name in ("index.sqlite", "index.sqlite-wal"):
        path = served.data_dir / name
        if path.exists():
            path.write_bytes(os.urandom(max(path.stat().st_size, 8192)))
    for entry in entries:
        assert served.get(entry).body == bytes(entry.buffer)
    wait_until(lambda: len(_listed(served)) == 10, "the index is not rebuilt")
    assert served.put(_small(99)).status == 201


def test_bytes_that_rot_are_never_served_and_can_be_replaced(start: Callable[..., Served]) -> None:
    entry = entry_for("rots", size_bytes=50_000)
    served = start()
    served.put(entry)
    assert served.get(entry).status == 200
    for action in ("get", "put"):
        blob = served.data_dir / "blobs" / "sha256" / entry.digest[:2] / entry.digest
        raw = bytearray(blob.read_bytes())
        raw[20_000] ^= 1
        blob.write_bytes(raw)
        if action == "get":
            answer = served.get(entry)
            assert (answer.status, answer.kind) == (500, "corrupt")
            assert served.get(entry).kind == "not_found"
            assert served.put(entry).status == 201
        else:
            # A put that meets rot is no conflict: it repairs.
            assert served.put(rival_of(entry)).status == 201
            assert served.get(entry).body == bytes(rival_of(entry).buffer)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m,mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(start: Callable[..., Served], small_disk: Path) -> None:
    """The disk is smaller than the limit: puts are refused, not half done; reads go on; room heals it unaided."""
    served = start(data_dir=small_disk / "data")
    filler = small_disk / "filler"
    _fill(filler)
    first = entry_for("first", size_bytes=10_000)
    answer = served.put(first)
    assert (answer.status, answer.kind) == (507, "full")
    assert served.get(first).kind == "not_found"
    assert served.ask("GET", "/healthz").status == 200
    assert served.ask("GET", "/readyz").status == 503
    filler.unlink()
    wait_until(lambda: served.put(first).status in (200, 201), "it takes no put")
    wait_until(lambda: served.ask("GET", "/readyz").status == 200, "it is not ready again")

    big = [entry_for(f"big {i}", size_bytes=3 << 20) for i in range(8)]
    for entry in big:
        wait_until(lambda entry=entry: served.put(entry).status in (200, 201), "it takes no put")  # type: ignore[misc]
        assert served.get(entry).body == bytes(entry.buffer)
    _fill(filler)
    # Room is kept back for the tombstones of what must go, so that even now one comes in for another.
    wanted = entry_for("comes in for another", size_bytes=1 << 20)
    assert served.put(wanted).status == 201
    assert served.get(wanted).body == bytes(wanted.buffer)
    assert served.put(entry_for("larger than all", size_bytes=30 << 20)).status in (503, 507)
    for entry in big:
        answer = served.get(entry)
        assert answer.body == bytes(entry.buffer) if answer.status == 200 else answer.kind == "not_found"
    assert list(served.data_dir.rglob(".writing-*")) == []
    filler.unlink()
    wait_until(
        lambda: served.put(entry_for("after", size_bytes=10_000)).status in (200, 201),
        "it takes no put",
    )


def _fill(filler: Path) -> None:
    with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_file_size_limit_in_the_middle_of_a_put(start: Callable[..., Served]) -> None:
    """The disk fails after some bytes were written: 507, and nothing is left."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    served = start(preexec=limit)
    large = entry_for("over the file size limit", size_bytes=3 << 20)
    for _ in range(2):
        answer = served.put(large)
        assert (answer.status, answer.kind) == (507, "full")
    assert list(served.data_dir.rglob(".writing-*")) == []
    assert served.get(large).kind == "not_found"
    assert served.put(entry_for("small enough", size_bytes=100_000)).status == 201


def test_a_limit_is_kept_by_eviction(start: Callable[..., Served]) -> None:
    served = start("--max-size", "2MB")
    for i in range(40):
        assert served.put(entry_for(f"evicting {i}", size_bytes=200_000)).status == 201
    stats = served.ask("GET", "/v1/default/stats").json
    assert stats["size_bytes"] <= stats["limit_bytes"] == 2_000_000
    assert 5 <= stats["entries"] < 10
    blobs = [path for path in (served.data_dir / "blobs").rglob("*") if path.is_file()]
    assert len(blobs) == stats["entries"]
    answer = served.put(entry_for("never", size_bytes=3 << 20))
    assert (answer.status, answer.kind, answer.json["limit_bytes"]) == (413, "too_large", 2_000_000)


def test_memory_stays_bounded(start: Callable[..., Served]) -> None:
    """100 MB up, and down to several readers at once, in tens of megabytes."""
    served = start()
    entry = entry_for("huge", executable=os.urandom(100 << 20))
    small = entry_for("warm up", size_bytes=100_000)
    served.put(small)
    served.get(small)
    before = served.resident_bytes()[0]
    assert served.put(entry).status == 201

    def read() -> None:
        with socket.create_connection((served.host, served.port), timeout=60) as connection:
            connection.sendall(
                f"GET {path_of(entry)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            received = 0
            while piece := connection.recv(1 << 20):
                received += len(piece)
            sizes.append(received)

    sizes: list[int] = []
    readers = [threading.Thread(target=read) for _ in range(4)]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join(60)
    assert len(sizes) == 4
    assert min(sizes) > entry.size_bytes
    peak = served.resident_bytes()[1]
    print(f"{(peak - before) / 1e6:.1f} MB more at the peak")
    assert peak < before + 40_000_000
    answer = served.ask("HEAD", path_of(entry))
    assert answer.headers["content-length"] == str(entry.size_bytes)
    assert wire.parse_content_digest(answer.headers["content-digest"]) == entry.digest
