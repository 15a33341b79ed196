"""The one way to bring a folder's names to the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from torchtpu_cache_core.stores.files import FILES
from torchtpu_cache_core.testing.faults import Fault, FaultyFiles


@pytest.mark.parametrize(
    ("error", "is_tolerated"),
    [(errno.EINVAL, True), (errno.EOPNOTSUPP, True), (errno.EIO, False), (errno.ENOSPC, False), (errno.EROFS, False)],
)
def test_only_a_file_system_without_it_is_forgiven(tmp_path: Path, error: int, is_tolerated: bool) -> None:
    files = FaultyFiles(Fault(call="fsync", error=error))
    before = os.listdir("/proc/self/fd")
    if is_tolerated:
        files.sync_folder(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            files.sync_folder(tmp_path)
    assert files.hits == {"fsync": 1}
    assert os.listdir("/proc/self/fd") == before


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    FILES.sync_folder(tmp_path)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError):
        FILES.sync_folder(file)
    with pytest.raises(FileNotFoundError):
        FILES.sync_folder(tmp_path / "none")
