"""What should be a file, and is none, holds nobody and costs no descriptor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.notes import read_note
from torchtpu_cache_core.regular import open_regular


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_and_closed(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "name"
    make(path)
    before = descriptors()
    with pytest.raises(OSError, match="no regular file"):
        open_regular(path, follows_links=True)
    with pytest.raises(OSError, match=r"no regular file|symbolic links"):
        open_regular(path, follows_links=False)
    with pytest.raises(Bypass):
        Environment.snapshot({"XLA_FLAGS": str(path)}, [])
    assert read_note(path, 100) is None
    assert descriptors() == before


def test_a_file_is_opened_through_a_link_only_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with open_regular(tmp_path / "link", follows_links=True) as file:
        assert file.read() == b"content"
    with pytest.raises(OSError, match="symbolic links"):
        open_regular(tmp_path / "link", follows_links=False)
