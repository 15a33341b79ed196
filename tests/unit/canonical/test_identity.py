"""File identities: the content alone, hashed once."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.identity import FileIdentities


class LaterClock:
    """Every file has settled by its time."""

    def time(self) -> float:
        return time.time() + 3600

    def monotonic(self) -> float:
        return time.monotonic()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libtpu.so"
    path.write_bytes(b"\x7fELF" + bytes(100_000))
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were really read, in order."""
    seen: list[str] = []
    real = hashlib.file_digest

    def counting(file: object, name: str) -> object:
        seen.append(str(getattr(file, "name", "")))
        return real(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", counting)
    return seen


def test_it_is_the_digest_of_the_bytes(library: Path) -> None:
    assert FileIdentities(None).sha256(library) == hashlib.sha256(library.read_bytes()).hexdigest()


def test_a_file_is_hashed_once_on_a_machine(library: Path, tmp_path: Path, hashed: list[str]) -> None:
    memo = tmp_path / "memo"
    digests = {FileIdentities(memo, clock=LaterClock()).sha256(library) for _ in range(3)}
    assert len(digests) == 1
    assert len(hashed) == 1
    (file,) = memo.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(memo.stat().st_mode) == 0o700


def test_many_threads_hash_once(library: Path, hashed: list[str]) -> None:
    identities = FileIdentities(None, clock=LaterClock())
    threads = [threading.Thread(target=identities.sha256, args=(library,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hashed) == 1


def test_other_bytes_of_equal_size_and_time_are_another_file(library: Path, tmp_path: Path) -> None:
    identities = FileIdentities(tmp_path / "memo", clock=LaterClock())
    before = identities.sha256(library)
    status = library.stat()
    with library.open("r+b") as file:
        file.write(b"\x7fELG")
    os.utime(library, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identities.sha256(library) != before


def test_a_young_file_is_not_remembered(library: Path, tmp_path: Path, hashed: list[str]) -> None:
    identities = FileIdentities(tmp_path / "memo")
    assert identities.sha256(library) == identities.sha256(library)
    assert len(hashed) == 2
    assert not (tmp_path / "memo").exists()


def test_a_file_dated_in_the_future_is_remembered(library: Path, tmp_path: Path, hashed: list[str]) -> None:
    """A package keeps the dates of the machine that built it; half a gigabyte must not be hashed at each look-up."""
    later = time.time() + 86_400
    os.utime(library, (later, later))
    identities = FileIdentities(tmp_path / "memo", clock=LaterClock())
    assert identities.sha256(library) == identities.sha256(library)
    assert len(hashed) == 1


@pytest.mark.parametrize("damage", [b"", b"\n", b"garbage", b"[1,2]\n" + b"0" * 64])
def test_a_damaged_memo_is_computed_again(library: Path, tmp_path: Path, hashed: list[str], damage: bytes) -> None:
    memo = tmp_path / "memo"
    digest = FileIdentities(memo, clock=LaterClock()).sha256(library)
    (file,) = memo.iterdir()
    file.write_bytes(damage)
    assert FileIdentities(memo, clock=LaterClock()).sha256(library) == digest
    assert len(hashed) == 2
    FileIdentities(memo, clock=LaterClock()).sha256(library)
    assert len(hashed) == 2


def test_a_memo_that_others_may_write_is_not_believed(library: Path, tmp_path: Path, hashed: list[str]) -> None:
    memo = tmp_path / "memo"
    FileIdentities(memo, clock=LaterClock()).sha256(library)
    (file,) = memo.iterdir()
    file.chmod(0o666)
    FileIdentities(memo, clock=LaterClock()).sha256(library)
    assert len(hashed) == 2


def test_a_memo_folder_that_cannot_be_made_is_no_error(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert FileIdentities(tmp_path / "file" / "memo", clock=LaterClock()).sha256(library)


def test_an_absent_file_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(Bypass) as caught:
        FileIdentities(None).sha256(tmp_path / "absent.so")
    assert caught.value.reason == "target_unknown"


def test_many_writers_of_one_memo(library: Path, tmp_path: Path) -> None:
    memo = tmp_path / "memo"
    found: set[str] = set()
    threads = [
        threading.Thread(target=lambda: found.add(FileIdentities(memo, clock=LaterClock()).sha256(library)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {hashlib.sha256(library.read_bytes()).hexdigest()}
    assert len(list(memo.iterdir())) == 1
