"""What a process has mapped is told apart from what lies under the same path by now."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtpu_cache.compilers.mapped import mapped_file, mapped_sha256
from torchtpu_cache_core.identity import FileIdentities

CONTENT = b"a compiler" * 1000


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "with space" / "lib.so"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        yield path


def sha256_of(mapped: object) -> str:
    return mapped_sha256(mapped, FileIdentities(None))


def test_the_mapped_file_is_found_and_hashed(library: Path) -> None:
    assert sha256_of(mapped_file(library)) == hashlib.sha256(CONTENT).hexdigest()


def test_a_file_that_is_not_mapped_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(CONTENT)
    assert mapped_file(tmp_path / "lib.so") is None


def test_a_link_to_the_mapped_file_is_that_file(library: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.so"
    link.symlink_to(library)
    assert mapped_file(library) is not None
    assert mapped_file(link) == mapped_file(library)


@pytest.mark.parametrize("same_content", [True, False])
def test_a_replaced_file_is_not_the_mapped_one(library: Path, same_content: bool) -> None:
    before = mapped_file(library)
    new = library.with_name("new")
    new.write_bytes(CONTENT if same_content else b"another")
    new.replace(library)
    assert sha256_of(before) == ""
    assert mapped_file(library) is None, "the kernel marks the old file as deleted"


def test_a_file_written_in_place_is_not_the_mapped_one(library: Path) -> None:
    before = mapped_file(library)
    with open(library, "r+b") as file:
        file.write(b"A")
    os.utime(library, ns=(0, 0))
    assert sha256_of(before) == ""


def test_a_deleted_file_has_no_identity(library: Path) -> None:
    before = mapped_file(library)
    library.unlink()
    assert sha256_of(before) == ""


@pytest.mark.parametrize("answer", [None, {}, {"path": 1, "stat": []}, {"path": "/nowhere", "stat": [1]}, "x"])
def test_an_answer_without_a_file_has_no_identity(answer: object) -> None:
    assert sha256_of(answer) == ""
