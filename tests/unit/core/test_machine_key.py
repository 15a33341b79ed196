"""The machine's own key."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torchtpu_cache_core.errors import StoreRefused
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.machine_key import is_still, known_here, machine_key
from torchtpu_cache_core.testing.entries import entry_for


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


def test_a_key_that_is_gone_is_put_back_and_one_that_was_replaced_is_not(tmp_path: Path) -> None:
    root = tmp_path / "root"
    key = machine_key(root)
    assert is_still(root, key)
    shutil.rmtree(root)
    assert is_still(root, key)
    assert machine_key(root) == key
    assert (root / "machine.key").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(root)
    other = machine_key(root)
    assert not is_still(root, key)
    assert machine_key(root) == other


def test_a_mark_goes_with_its_key(tmp_path: Path) -> None:
    entry, root = entry_for("marked"), tmp_path / "root"
    key = machine_key(root)
    mark = Attestation.by_machine(key, DEFAULT_NAMESPACE, entry)
    assert known_here(mark, root, key) == mark
    shutil.rmtree(root)
    machine_key(root)
    assert known_here(mark, root, key) is None
    shutil.rmtree(root)
    root.write_bytes(b"a file where the folder was")
    assert known_here(mark, root, key) is None


@pytest.mark.parametrize("meanwhile", ["nobody", "another process"])
def test_what_is_stored_after_the_folder_was_removed_is_read_by_new_processes(tmp_path: Path, meanwhile: str) -> None:
    root, entry = tmp_path / "root", entry_for("after the folder was removed")

    def store() -> DiskStore:
        limits = {"limit_bytes": 1 << 20, "limit_entries": 100, "min_free_bytes": 0}
        return DiskStore(root, DEFAULT_NAMESPACE, machine_key=machine_key(root), **limits)

    key, old = machine_key(root), store()
    shutil.rmtree(root)
    if meanwhile == "another process":
        store()
    old.put(entry, Attestation.by_machine(key, DEFAULT_NAMESPACE, entry))
    found = store().get(entry.key)
    assert found is not None
    assert found.entry.digest == entry.digest
    assert (found.attestation is None) == (meanwhile == "another process")
