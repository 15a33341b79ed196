"""Flags by every road, by the rules of the two readers."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.canonical.flags import (
    Flag,
    Flags,
    parse_argv,
    parse_init_args,
    parse_xla_flags,
)
from torchtpu_cache_core.errors import Bypass


def xla(text: str) -> dict[str, str]:
    return parse_xla_flags(text).canonical(noted={})


def init(text: str) -> dict[str, str]:
    return parse_init_args(text, noted={}).canonical(noted={})


def command_line(argv: list[str]) -> dict[str, str]:
    return parse_argv(argv, noted={}).canonical(noted={})


@pytest.mark.parametrize(
    ("text", "flags", "rest"),
    [
        ("", [], ""),
        ("  --xla_a=1\t--xla_b\n", [("xla_a", "1"), ("xla_b", None)], ""),
        ("--xla_a='x y' --xla_b=2", [("xla_a", "x y"), ("xla_b", "2")], ""),
        (r'--xla_a="x \"y\" \\z"', [("xla_a", r'x "y" \z')], ""),
        (r"--xla_a='x \y'", [("xla_a", r"x \y")], ""),
        ("--xla_a=x'y z'", [("xla_a", "x'y")], "z'"),
        ("--xla_a='never closed", [("xla_a", "never closed")], ""),
        ("--xla_a=1 stop --xla_b=2", [("xla_a", "1")], "stop --xla_b=2"),
    ],
)
def test_xla_reader(text: str, flags: list[tuple[str, str | None]], rest: str) -> None:
    parsed = parse_xla_flags(text)
    assert parsed.flags == tuple(Flag(*flag) for flag in flags)
    assert parsed.rest == rest


@pytest.mark.parametrize("white", ["\t", "\n", "\x1f", "\x85", "\xa0", "\u2028"])
def test_libtpu_splits_at_blanks_alone(white: str, tmp_path: Path) -> None:
    """What else is white is a part of the value, so the flag behind it is none."""
    assert init(f"--xla_a=x{white}--xla_b=y") == {"xla_a": f"x{white}--xla_b=y"}
    if white not in "\t\n":
        (tmp_path / "flags").write_text(f"--xla_a=x{white}--xla_b=y\n", encoding="utf-8")
        found = init(f"--flagfile={tmp_path / 'flags'}")
        assert found == {"xla_a": f"x{white}--xla_b=y"}


@pytest.mark.parametrize("read", [xla, init])
def test_order_of_different_flags_has_no_meaning(read: object) -> None:
    assert callable(read)
    assert read("--xla_a=1 --xla_b=x") == read("--xla_b=x --xla_a=1") == {"xla_a": "1", "xla_b": "x"}


@pytest.mark.parametrize("read", [xla, init])
def test_the_same_flag_twice(read: object) -> None:
    assert callable(read)
    assert read("--xla_a=1 --xla_a=2") == read("--xla_a=2") != read("--xla_a=2 --xla_a=1")
    # A flag of words may add to what it had, so all its values are kept, in order.
    texts = ["--xla_a=x --xla_a=y", "--xla_a=y --xla_a=x", "--xla_a=y", "--xla_a=x,y"]
    assert len({str(read(text)) for text in texts}) == 4


def test_the_order_of_a_flag_and_its_negation_counts() -> None:
    assert init("--noxla_a --xla_a=true") != init("--xla_a=true --noxla_a")
    assert init("--noxla_a=true --xla_b=1") == init("--xla_b=1 --noxla_a=true")


def test_ways_to_write_a_boolean() -> None:
    assert (
        xla("--xla_cpu_enable_fast_math")
        == xla("--xla_cpu_enable_fast_math=true")
        == xla("--xla_cpu_enable_fast_math=1")
    )
    assert xla("--xla_cpu_enable_fast_math=0") == xla("--xla_cpu_enable_fast_math=false")
    assert xla("--xla_unknown=1") != xla("--xla_unknown=true")


def test_dump_and_log_flags_are_left_out() -> None:
    assert xla("--xla_dump_to=/tmp/7 --xla_dump_hlo_as_text --xla_a=1") == xla("--xla_a=1")
    assert init("--xla_dump_to=/x --minloglevel=2 --vmodule=a=3") == {}
    assert xla("--xla_dump_hlo_snapshots") != {}


def test_an_explicit_default_is_a_flag() -> None:
    assert xla("--xla_cpu_enable_fast_math=false") != {}


def test_flags_that_set_others_keep_all_order() -> None:
    assert xla("--xla_flags_reset --xla_a=1") != xla("--xla_a=1 --xla_flags_reset")
    assert xla("--xla_flags_reset --xla_dump_to=/x --xla_a=1") == xla("--xla_flags_reset --xla_a=1")
    scheduler = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_DEFAULT"
    switch = "--xla_cpu_enable_concurrency_optimized_scheduler"
    assert xla(f"{scheduler} {switch}") != xla(f"{switch} {scheduler}")


def test_a_bare_word_stays_with_its_flag() -> None:
    assert init("--xla_a 1 --xla_b 2") != init("--xla_a 2 --xla_b 1")
    assert init("--xla_a 1") != init("--xla_a --1") != init("--xla_a=1")
    assert init("--xla_a --xla_b=1") != init("--xla_b=1 --xla_a")


def test_quotes_in_init_args_are_not_undone() -> None:
    texts = ["--xla_a='x  y'", "--xla_a='x y'", '--xla_a="x y"', "--xla_a=x\\ y"]
    assert len({str(init(text)) for text in texts}) == 4


def test_flag_files_are_read_in_place(tmp_path: Path) -> None:
    inner, outer, copy = tmp_path / "inner", tmp_path / "outer", tmp_path / "copy"
    inner.write_text("# what we want\n--xla_a=1\n\n")
    outer.write_text(f"--flagfile={inner}\n--xla_b=2\n")
    copy.write_text(outer.read_text())
    assert init(f"--flagfile={outer}") == init(f"--flagfile={copy}") == {"xla_a": "1", "xla_b": "2"}
    assert init(f"--xla_a=3 --flagfile={inner}") != init(f"--flagfile={inner} --xla_a=3")
    inner.write_text("--xla_a=4")
    assert init(f"--flagfile={outer}") == {"xla_a": "4", "xla_b": "2"}


@pytest.mark.parametrize("text", ["--flagfile=/nowhere/flags", "--flagfile x", "--fromenv=xla_a", "--tryfromenv=xla_a"])
def test_flags_that_cannot_be_seen_bypass(text: str) -> None:
    with pytest.raises(Bypass):
        init(text)


def test_flag_files_that_name_each_other_bypass(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.write_text(f"--flagfile={loop}")
    with pytest.raises(Bypass, match="four levels"):
        init(f"--flagfile={loop}")


def test_a_value_that_is_a_file_counts_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text("one")
    before = xla(f"--xla_unknown_table={path}")
    path.write_text("two")
    assert xla(f"--xla_unknown_table={path}") != before
    other = tmp_path / "other"
    other.write_text("two")
    assert xla(f"--xla_unknown_table={path}") != xla(f"--xla_unknown_table={other}")
    known = "--xla_gpu_target_config_filename="
    assert xla(f"{known}{path}") == xla(f"{known}{other}")


def test_a_folder_of_profiles_counts_with_its_content(tmp_path: Path) -> None:
    flag = f"--xla_gpu_pgle_profile_file_or_directory_path={tmp_path}"
    seen = {str(xla(flag))}
    for name, content in [("a", "1"), ("b", "1"), ("b", "2")]:
        (tmp_path / name).write_text(content)
        seen.add(str(xla(flag)))
    assert len(seen) == 4


def test_a_value_cannot_pose_as_what_was_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text("one")
    read = f"content:sha256:{hashlib.sha256(b'one').hexdigest()}"
    known, unknown = "--xla_gpu_target_config_filename=", "--xla_unknown_table="
    texts = [f"{known}{value}" for value in (path, read, f"{read} literal", f"{read} literal literal")]
    texts += [f"{unknown}{value}" for value in (path, f"{path} {read}", f"{path} {read} literal", read)]
    assert len({str(xla(text.replace("=", "='", 1) + "'")) for text in texts}) == len(texts)
    assert xla(f"{known}{read.upper()}") == {"xla_gpu_target_config_filename": read.upper()}


def test_a_file_cannot_pose_as_a_folder(tmp_path: Path) -> None:
    folder, listing = tmp_path / "folder", tmp_path / "listing"
    folder.mkdir()
    (folder / "a").write_text("x")
    listing.write_text(f"1:a{hashlib.sha256(b'x').hexdigest()}")
    flag = "--xla_gpu_pgle_profile_file_or_directory_path="
    assert xla(f"{flag}{folder}") != xla(f"{flag}{listing}")


def test_a_file_named_like_a_number_is_read_for_a_flag_that_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = [xla("--xla_gpu_target_config_filename=1 --xla_unknown=1")]
    for content in ("one", "two"):
        (tmp_path / "1").write_text(content)
        seen.append(xla("--xla_gpu_target_config_filename=1 --xla_unknown=1"))
    assert len({each["xla_gpu_target_config_filename"] for each in seen}) == 3
    assert {each["xla_unknown"] for each in seen} == {"1"}


@pytest.mark.parametrize("flag", ["--xla_gpu_target_config_filename=", "--xla_unknown_table=", "--flagfile="])
def test_a_pipe_or_a_file_of_each_process_bypasses(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "table"
    path.write_text("--xla_one")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read, write = os.pipe()
    with path.open() as file:
        number = file.fileno()
        own = (f"/proc/self/fd/{number}", f"/dev/fd/{number}", f"//dev/fd/{number}", f"/dev/fd/{read}")
        for name in (str(pipe), *own, os.path.relpath("/proc/self/stat")):
            with pytest.raises(Bypass):
                init(f"{flag}{name}")
    os.close(read)
    os.close(write)


def test_a_name_of_which_nothing_is_known_bypasses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table"
    table.touch()
    for name in (f"{tmp_path}/absent", f"{table}/below", "x" * 300):
        assert xla(f"--xla_unknown_table={name}") == {"xla_unknown_table": name}

    def broken(*_args: object, **_more: object) -> os.stat_result:
        raise OSError(errno.EIO, "a disk fails")

    monkeypatch.setattr(Path, "stat", broken)
    with pytest.raises(Bypass, match="cannot be read"):
        xla(f"--xla_unknown_table={table}")


def test_a_job_whose_folder_is_gone_has_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, table = tmp_path / "folder", tmp_path / "table"
    folder.mkdir()
    table.touch()
    before = xla(f"--xla_unknown_table={table} --xla_unknown_word=word")
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert xla(f"--xla_unknown_table={table} --xla_unknown_word=word") == before


def test_a_device_is_no_table_but_may_be_named(tmp_path: Path) -> None:
    assert xla("--xla_unknown_device=/dev/zero") == {"xla_unknown_device": "/dev/zero"}
    assert xla("--xla_gpu_target_config_filename=/dev/null") == {"xla_gpu_target_config_filename": "/dev/null"}
    with pytest.raises(Bypass, match="cannot be read"):
        xla("--xla_gpu_target_config_filename=/dev/zero")


def test_no_flag_poses_as_a_word_or_a_group() -> None:
    assert init("--xla_a 1") != init("--xla_a --*word*=1")
    assert len({str(init(f"--xla_a{word}")) for word in (" 1", " --=1", " --==1", " -==1", " ==1", " =1")}) == 5
    assert xla("--*rest*=x") != Flags((), rest="x").canonical(noted={})
    assert len({str(init(f"--{name}=1")) for name in ("rest*", "*rest*", "**rest*", "*ordered*", "*all*")}) == 5
    assert not {"*rest*", "*ordered*", "*all*"} & init("--*rest*=1 --*ordered*=1 --*all*=1").keys()


def test_flags_behind_the_end_of_flags_are_others() -> None:
    assert len({str(command_line(argv)) for argv in (["--xla_a=1"], ["--", "--xla_a=1"], ["--"])}) == 3
    assert command_line(["--xla_a=1", "--", "data"]) == command_line(["--xla_a=1"])
    assert command_line(["--xla_a=1", "--", "-xla_b"]) != command_line(["--", "--xla_a=1", "-xla_b"])


def test_argv_gives_only_compiler_flags() -> None:
    argv = ["train.py", "--steps=3", "--xla_a=1", "run7", "--tpu_b", "value", "--libtpu_c=2", "-xla_d=3", "--lr", "x"]
    flags = parse_argv(argv, noted={})
    assert [f.name for f in flags.flags] == ["xla_a", "tpu_b", "=", "libtpu_c", "xla_d"]
    assert command_line(["--xla_a=1", "-xla_b=2"]) == {"xla_a": "1", "xla_b": "2"}
    assert command_line(["job", "--port=8000", "--tryfromenv=port"]) == {}
    with pytest.raises(Bypass):
        parse_argv(["job", "--tryfromenv=port,xla_a"], noted={})


def test_only_compiler_flags_of_a_job_s_flag_file_count(tmp_path: Path) -> None:
    """A job's own flag file may hold a port or a run's name."""
    path = tmp_path / "flags"
    path.write_text("--port=8000\n--run\n--xla_a=1\n")
    assert command_line(["job", f"--flagfile={path}"]) == {"xla_a": "1"}


def test_effective_value() -> None:
    flags = parse_xla_flags("--xla_a=1 --xla_a=2 --xla_b")
    assert (flags.effective("xla_a"), flags.effective("xla_b"), flags.effective("xla_c")) == ("2", "true", None)


@given(st.text(alphabet="-ax=1 '\"\\\n", max_size=40))
def test_arbitrary_text(text: str) -> None:
    assert xla(text) == xla(text)
    assert init(text) == init(text)


PAIRS = st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["0", "1", "x", "y z", "[1:x]"])), max_size=5)


@given(PAIRS, PAIRS)
def test_equal_texts_only_for_equal_effects(left: list[tuple[str, str]], right: list[tuple[str, str]]) -> None:
    def text(pairs: list[tuple[str, str]]) -> str:
        return " ".join(f"--xla_{name}='{value}'" for name, value in pairs)

    def effect(pairs: list[tuple[str, str]]) -> dict[str, object]:
        values: dict[str, list[str]] = {}
        for name, value in pairs:
            values.setdefault(name, []).append(value)
        return {n: v[-1] if all(x in "01" for x in v) else v for n, v in values.items()}

    assert (xla(text(left)) == xla(text(right))) == (effect(left) == effect(right))
