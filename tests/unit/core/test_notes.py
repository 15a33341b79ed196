"""Small files that processes of one user leave each other."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torchtpu_cache_core.notes import read_note, write_note


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "name"
    assert write_note(path, {"a": [1]}, 100)
    note = read_note(path, 100)
    assert note is not None
    assert note.value == {"a": [1]}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_write_removes_what_dead_writers_left_and_nothing_else(tmp_path: Path) -> None:
    dead, living, foreign = (tmp_path / name for name in (".note-dead", ".note-living", "foreign"))
    for path in (dead, living, foreign):
        path.write_bytes(b"half")
    for path in (dead, foreign):
        os.utime(path, (time.time() - 4000, time.time() - 4000))
    assert write_note(tmp_path / "name", 1, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".note-living", "foreign", "name"]
