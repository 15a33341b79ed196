"""The machine's own key."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import StoreRefused
from torchtpu_cache_core.stores.machine_key import machine_key


def test_it_is_made_once_and_private(tmp_path: Path) -> None:
    root = tmp_path / "root"
    key = machine_key(root)
    assert len(key) == 32
    assert machine_key(root) == key
    assert machine_key(tmp_path / "other") != key
    assert [path.name for path in root.iterdir()] == ["machine.key"]
    assert (root / "machine.key").stat().st_mode & 0o777 == 0o600


def test_all_who_make_it_at_once_get_the_same(tmp_path: Path) -> None:
    for round_ in range(20):
        with ThreadPoolExecutor(8) as pool:
            keys = set(pool.map(machine_key, [tmp_path / f"root {round_}"] * 8))
        assert len(keys) == 1


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_length_is_replaced(tmp_path: Path, size: int) -> None:
    path = tmp_path / "machine.key"
    machine_key(tmp_path)
    path.write_bytes(bytes(size))
    key = machine_key(tmp_path)
    assert len(key) == 32
    assert machine_key(tmp_path) == key


def test_what_dead_writers_left_goes(tmp_path: Path) -> None:
    """One died before its key had a name, another after it, a third while it replaced a bad one."""
    (tmp_path / ".machine.key-0123456789abcdef").write_bytes(b"half")
    key = machine_key(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["machine.key"]
    (tmp_path / ".machine.key-1123456789abcdef").hardlink_to(tmp_path / "machine.key")
    assert machine_key(tmp_path) == key
    assert [path.name for path in tmp_path.iterdir()] == ["machine.key"]
    (tmp_path / "machine.key").write_bytes(b"")
    (tmp_path / ".machine.key-2123456789abcdef").write_bytes(b"half")
    assert len(machine_key(tmp_path)) == 32
    assert [path.name for path in tmp_path.iterdir()] == ["machine.key"]


def test_a_living_writer_whose_file_was_taken_away_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, taken = os.fsync, []

    def take_away(fd: int) -> None:
        fsync(fd)
        if not taken:
            taken.extend(tmp_path.glob(".machine.key-*"))
            taken[0].unlink()

    monkeypatch.setattr(os, "fsync", take_away)
    assert machine_key(tmp_path) == (tmp_path / "machine.key").read_bytes()
    assert len(taken) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    machine_key(tmp_path)
    (tmp_path / "machine.key").chmod(mode)
    with pytest.raises(StoreRefused, match="only you can read"):
        machine_key(tmp_path)


def test_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "machine.key").symlink_to("/dev/zero")
    with pytest.raises(StoreRefused):
        machine_key(tmp_path)
