from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchtpu_cache.compilers.memo import TargetMemo

PARTS = {"platform": "tpu", "devices": "[]"}
QUESTION = ["compiler", "v5e:2x2", "XLA_FLAGS=--a"]


def only_file(folder: Path) -> Path:
    [path] = folder.iterdir()
    return path


def test_a_later_process_finds_what_an_earlier_one_put(tmp_path: Path) -> None:
    TargetMemo(tmp_path / "memo").put(QUESTION, PARTS)
    assert TargetMemo(tmp_path / "memo").get(QUESTION) == PARTS
    assert (tmp_path / "memo").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", [QUESTION[:2], [*QUESTION, ""], ["compilerv5e:2x2", "XLA_FLAGS=--a"], []])
def test_another_question_has_no_answer(tmp_path: Path, other: list[str]) -> None:
    TargetMemo(tmp_path).put(QUESTION, PARTS)
    assert TargetMemo(tmp_path).get(other) is None


def test_without_a_folder_it_remembers_in_the_process() -> None:
    memo = TargetMemo(None)
    memo.put(QUESTION, PARTS)
    assert memo.get(QUESTION) == PARTS
    assert TargetMemo(None).get(QUESTION) is None


def test_what_was_put_cannot_be_changed_through_the_caller_s_dictionary(tmp_path: Path) -> None:
    memo = TargetMemo(tmp_path)
    parts = dict(PARTS)
    memo.put(QUESTION, parts)
    parts["platform"] = "cpu"
    found = memo.get(QUESTION)
    assert found == PARTS
    found["platform"] = "cpu"
    assert memo.get(QUESTION) == PARTS


def test_no_damage_gives_an_answer(tmp_path: Path) -> None:
    TargetMemo(tmp_path).put(QUESTION, PARTS)
    path = only_file(tmp_path)
    good = path.read_bytes()
    for damaged in (b"", b"\n", good[:-1], good + b" ", good.replace(b"tpu", b"cpu"), good[65:], os.urandom(200)):
        path.write_bytes(damaged)
        assert TargetMemo(tmp_path).get(QUESTION) is None
    for index in range(0, len(good), 7):
        path.write_bytes(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
        assert TargetMemo(tmp_path).get(QUESTION) is None


def test_a_memo_under_another_question_s_name_is_refused(tmp_path: Path) -> None:
    TargetMemo(tmp_path).put(["other"], PARTS)
    other = only_file(tmp_path)
    TargetMemo(tmp_path).put(QUESTION, {"platform": "cpu"})
    [mine] = [path for path in tmp_path.iterdir() if path != other]
    other.replace(mine)
    assert TargetMemo(tmp_path).get(QUESTION) is None


@pytest.mark.parametrize("kind", ["writable by others", "symbolic link", "folder"])
def test_a_memo_that_others_could_write_is_refused(tmp_path: Path, kind: str) -> None:
    TargetMemo(tmp_path).put(QUESTION, PARTS)
    path = only_file(tmp_path)
    if kind == "writable by others":
        path.chmod(0o666)
    else:
        path.rename(tmp_path / "elsewhere")
        if kind == "symbolic link":
            path.symlink_to(tmp_path / "elsewhere")
        else:
            path.mkdir()
    assert TargetMemo(tmp_path).get(QUESTION) is None


def test_a_folder_that_cannot_be_made_costs_the_memo_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    memo = TargetMemo(tmp_path / "file" / "memo")
    memo.put(QUESTION, PARTS)
    assert memo.get(QUESTION) == PARTS
    assert TargetMemo(tmp_path / "file" / "memo").get(QUESTION) is None


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    TargetMemo(tmp_path).put(QUESTION, PARTS)
    TargetMemo(tmp_path).put(QUESTION, PARTS)
    assert only_file(tmp_path).name.startswith("target-")
