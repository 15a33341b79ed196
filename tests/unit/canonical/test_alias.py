"""Aliases: found again by what they depend on, and worth nothing once touched."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from torchtpu_cache_core.canonical.alias import AliasStore, alias_name

NAME = alias_name("ttc1", "jaxlib", "1", "program")


class FixedClock:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def time(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


def only_file(folder: Path) -> Path:
    (found,) = (path for path in folder.rglob("*") if path.is_file())
    return found


def test_round_trip(tmp_path: Path) -> None:
    store = AliasStore(tmp_path / "aliases")
    assert store.get(NAME) is None
    store.put(NAME, {"facts": {"form": "text"}})
    assert AliasStore(tmp_path / "aliases").get(NAME) == {"facts": {"form": "text"}}
    assert stat.S_IMODE(only_file(tmp_path).stat().st_mode) == 0o600
    store.put(NAME, {"bypass": "host_callback"})
    assert store.get(NAME) == {"bypass": "host_callback"}
    assert only_file(tmp_path)


def test_every_part_names_another_alias() -> None:
    names = {alias_name(*parts) for parts in (("a", "b"), ("b", "a"), ("ab",), ("ab", ""), ("", "ab"), ("a", "b", ""))}
    assert len(names) == 6


@pytest.mark.parametrize("position", [0, 9, 40, -70, -1])
def test_a_changed_byte_is_an_absent_alias_and_is_replaced(tmp_path: Path, position: int) -> None:
    store = AliasStore(tmp_path)
    store.put(NAME, {"a": 1})
    path = only_file(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
    assert store.get(NAME) is None
    store.put(NAME, {"a": 2})
    assert store.get(NAME) == {"a": 2}


@pytest.mark.parametrize("content", [b"", b"\n", b"{}", b"null\n", b"\xff" * 100, b"x" * (300 << 10)])
def test_garbage_is_an_absent_alias(tmp_path: Path, content: bytes) -> None:
    store = AliasStore(tmp_path)
    store.put(NAME, {"a": 1})
    only_file(tmp_path).write_bytes(content)
    assert store.get(NAME) is None


def test_an_alias_under_another_name_is_absent(tmp_path: Path) -> None:
    store = AliasStore(tmp_path)
    store.put(NAME, {"a": 1})
    other = NAME[:-1] + ("0" if NAME[-1] != "0" else "1")
    path = only_file(tmp_path)
    shutil.copy(path, path.with_name(other))
    assert store.get(other) is None


def test_a_file_that_others_may_write_is_absent(tmp_path: Path) -> None:
    store = AliasStore(tmp_path)
    store.put(NAME, {"a": 1})
    only_file(tmp_path).chmod(0o666)
    assert store.get(NAME) is None


def test_links_pipes_and_folders_are_absent(tmp_path: Path) -> None:
    store = AliasStore(tmp_path)
    store.put(NAME, {"a": 1})
    path = only_file(tmp_path)
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert store.get(NAME) is None
    path.unlink()
    os.mkfifo(path)
    assert store.get(NAME) is None
    path.unlink()
    path.mkdir()
    assert store.get(NAME) is None
    store.put(NAME, {"a": 2})
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = AliasStore(tmp_path / "file" / "aliases")
    store.put(NAME, {"a": 1})
    assert store.get(NAME) is None


def test_a_record_over_the_limit_is_not_kept(tmp_path: Path) -> None:
    store = AliasStore(tmp_path)
    store.put(NAME, {"a": "x" * (300 << 10)})
    assert store.get(NAME) is None


def test_the_oldest_go(tmp_path: Path) -> None:
    clock = FixedClock(1_000_000.0)
    store = AliasStore(tmp_path, max_aliases=256 * 3, clock=clock)
    names = [f"ab0{i:061x}" for i in range(6)]
    for age, name in enumerate(reversed(names)):
        store.put(name, {})
        os.utime(tmp_path / "ab" / name, (clock.seconds - 1000 + age, clock.seconds - 1000 + age))
    clock.seconds += 1
    store.put("ab00" + "f" * 60, {})  # names whose third and fourth digits divide by sixteen prune their shard
    kept = {path.name for path in (tmp_path / "ab").iterdir()}
    assert kept == {"ab00" + "f" * 60, names[0], names[1]}


def test_a_hit_on_an_old_alias_makes_it_young(tmp_path: Path) -> None:
    clock = FixedClock(1_000_000.0)
    store = AliasStore(tmp_path, clock=clock)
    store.put(NAME, {"a": 1})
    path = only_file(tmp_path)
    os.utime(path, (0, 0))
    assert store.get(NAME) == {"a": 1}
    assert path.stat().st_mtime == clock.seconds
    clock.seconds += 100
    assert store.get(NAME) == {"a": 1}
    assert path.stat().st_mtime == clock.seconds - 100
