"""`torchtpu-cache compile`: the mission in one command, and one clear sentence for everything that can be wrong."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import ttc
from support.service import running_service

MODULE = "jax_mlp4_sgd_step.mlirbc"


@pytest.fixture
def module(corpus: Path) -> Path:
    return corpus / MODULE


def test_every_tier_in_turn(tmp_path: Path, corpus: Path) -> None:
    files = [corpus / MODULE, corpus / "torch_mlp_fwd.mlirbc"]
    with running_service(tmp_path / "service") as service:
        common = ["compile", *files, "--json", "--remote", service.url, "--cache-dir"]
        first = ttc(*common, tmp_path / "a")
        assert first.code == 0, first.err
        again = ttc(*common, tmp_path / "a")
        elsewhere = ttc(*common, tmp_path / "b")
    for answer, tier in ((first, "compiled"), (again, "disk"), (elsewhere, "remote")):
        assert [line["tier"] for line in answer.lines] == [tier, tier], answer.err
        for line, file in zip(answer.lines, files, strict=True):
            assert line["file"] == str(file)
            assert line["schema"] == 1
            assert line["executable_bytes"] > 0
            assert line["compile_seconds"] > 0
            assert line["seconds"] > 0
    assert [line["key"] for line in first.lines] == [line["key"] for line in elsewhere.lines]
    assert [line["digest"] for line in first.lines] == [line["digest"] for line in elsewhere.lines]


def test_bytecode_and_text_of_one_program_share_an_executable(tmp_path: Path, corpus: Path) -> None:
    base = corpus / "jax_tfm24_adamw_step"
    keys = {
        ttc("dev", "key", base.with_suffix(suffix), "--json", "--cache-dir", tmp_path).json["key"]
        for suffix in (".mlir", ".mlirbc")
    }
    assert len(keys) == 1


def test_a_person_sees_a_table(tmp_path: Path, module: Path) -> None:
    answer = ttc("compile", module, "--cache-dir", tmp_path / "cache")
    assert answer.code == 0
    assert MODULE in answer.out
    assert "compiled" in answer.out
    assert answer.err == ""


def test_a_long_name_and_its_numbers_stay_whole(tmp_path: Path, module: Path) -> None:
    long = tmp_path / ("a_name_" * 19 + ".mlirbc")
    shutil.copy(module, long)
    answer = ttc("compile", long, "--cache-dir", tmp_path / "cache", environ={"COLUMNS": "80"})
    (row,) = answer.out.splitlines()[2:]
    assert re.fullmatch(rf"{long.name} compiled +[\d.]+ m?s +- +[\d.]+ kB ttc1-[0-9a-f]{{12}}", row)


def test_errors_stand_below_the_table_with_their_file(tmp_path: Path, module: Path) -> None:
    bad, missing = tmp_path / "bad.mlir", tmp_path / "missing.mlir"
    bad.write_text("not MLIR")
    answer = ttc("compile", bad, module, missing, "--cache-dir", tmp_path / "cache")
    assert answer.code == 3
    assert re.search(r"^bad\.mlir +failed +[\d.]+ m?s +- +- -$", answer.out, re.MULTILINE)
    first, second = answer.err.splitlines()
    assert re.match(rf"error: {bad}: .*no StableHLO module that this XLA can read", first)
    assert "forward incompatibility" not in first
    assert second == f"error: {missing}: No such file or directory"


def test_verbose_says_where_each_program_came_from(tmp_path: Path, module: Path) -> None:
    common = ["-v", "compile", module, "--json", "--cache-dir", tmp_path / "cache"]
    first, second = ttc(*common), ttc(*common)
    for answer, tier in ((first, "compiled"), (second, "disk")):
        assert re.search(rf"^INFO: {module}: {tier} in .* m?s, key {answer.json['key']}$", answer.err, re.MULTILINE)


def test_a_warning_does_not_share_its_line_with_the_progress(tmp_path: Path, module: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    command = [sys.executable, "-m", "torchtpu_cache.cli.main", "-v", "compile", str(module)]
    environ = {**os.environ, "TORCHTPU_CACHE_DIR": str(tmp_path / "cache"), "TERM": "xterm"}
    environ.pop("COLUMNS", None)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environ) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
            while part := os.read(ours, 4096):
                seen += part
    os.close(ours)
    assert process.returncode == 0
    line = next(line for line in seen.split(b"\n") if b"INFO" in line)
    assert line.rpartition(b"\x1b[2K")[2].startswith(b"INFO: "), line


def test_out_writes_the_executable(tmp_path: Path, module: Path) -> None:
    answer = ttc("compile", module, "--out", tmp_path / "out", "--json", "--cache-dir", tmp_path / "cache")
    written = tmp_path / "out" / "jax_mlp4_sgd_step.cpu.pjrt"
    assert answer.json["out"] == str(written)
    assert written.stat().st_size == answer.json["executable_bytes"]
    assert list((tmp_path / "out").iterdir()) == [written]


def test_a_bad_file_among_good_ones_costs_only_itself(tmp_path: Path, module: Path) -> None:
    bad = tmp_path / "bad.mlirbc"
    bad.write_bytes(b"ML\xefR" + os.urandom(100))
    missing = tmp_path / "missing.mlirbc"
    answer = ttc("compile", bad, module, missing, "--json", "--cache-dir", tmp_path / "cache")
    assert answer.code == 3
    assert [line.get("tier") for line in answer.lines] == [None, "compiled", None]
    assert "No such file" in answer.lines[2]["error"]
    assert all("\n" not in line.get("error", "") for line in answer.lines)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"not MLIR at all", b"module {", b"ML\xefR", b"\xff" * 1000])
def test_a_file_that_is_no_program_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.mlir"
    bad.write_bytes(content)
    answer = ttc("compile", bad, "--json", "--cache-dir", tmp_path / "cache")
    assert answer.code == 1
    assert answer.json["error"]
    assert len(answer.json["error"]) < 500
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--target", "v9z:2x2"], 2, "v5e:2x2"),
        (["--target", "v5e"], 2, "v5e:2x2"),
        (["--target", "../../etc"], 2, "target"),
        (["--remote", "ftp://somewhere"], 2, "must begin with http"),
        (["--remote", "http://192.0.2.1:8077"], 2, "loopback"),
        (["--namespace", "Not/A/Name"], 2, "is not a namespace"),
        (["--options", "missing.pb"], 2, "No such file"),
        (["--out", "/proc/nothing"], 2, "--out"),
    ],
)
def test_wrong_arguments_are_one_sentence_and_exit_code_2(
    tmp_path: Path, module: Path, arguments: list[str], code: int, says: str
) -> None:
    answer = ttc("compile", module, "--cache-dir", tmp_path / "cache", *arguments)
    assert answer.code == code, answer.err
    assert says in answer.one_sentence()


def test_options_that_are_none_are_one_sentence(tmp_path: Path, module: Path) -> None:
    options = tmp_path / "options.pb"
    options.write_bytes(b"\xff\xff\xff\xff")
    answer = ttc("compile", module, "--options", options, "--json", "--cache-dir", tmp_path / "cache")
    assert answer.code == 1
    assert "options" in answer.json["error"].lower()


def test_two_files_of_one_name_are_refused_before_anything_is_lost(tmp_path: Path, module: Path) -> None:
    other = tmp_path / "other" / MODULE
    other.parent.mkdir()
    shutil.copy(module, other)
    answer = ttc("compile", module, other, "--out", tmp_path / "out", "--cache-dir", tmp_path / "cache")
    assert answer.code == 2
    assert "different folders" in answer.one_sentence()


def test_a_dead_remote_costs_little_and_is_said(tmp_path: Path, module: Path) -> None:
    answer = ttc(
        "compile", module, "--json", "--remote", "http://127.0.0.1:9", "--cache-dir", tmp_path / "cache",
        environ={"TORCHTPU_CACHE_DRAIN_SECONDS": "0"},
    )  # fmt: skip
    assert answer.code == 0
    assert answer.json["tier"] == "compiled"
    assert "the remote was degraded (1 x connect)" in answer.err
    assert "1 executable waits for http://127.0.0.1:9; the next compile with this --remote" in answer.err
    status = ttc("status", "--json", "--cache-dir", tmp_path / "cache").json
    assert (status["remote"], status["spool"]["entries"]) == (None, 1)
    assert "waiting    1 executable, " in ttc("status", "--cache-dir", tmp_path / "cache").out


def test_what_a_dead_remote_missed_is_sent_by_the_next_run(tmp_path: Path, module: Path) -> None:
    common = ["compile", module, "--json", "--cache-dir", tmp_path / "cache", "--remote"]
    with running_service(tmp_path / "service") as service:
        url, port = service.url, service.port
    assert ttc(*common, url, environ={"TORCHTPU_CACHE_DRAIN_SECONDS": "0"}).json["tier"] == "compiled"
    with running_service(tmp_path / "service", listen=f"127.0.0.1:{port}") as service:
        assert ttc(*common, url).json["tier"] == "disk"
        elsewhere = ["compile", module, "--json", "--cache-dir", tmp_path / "other", "--remote", url]
        assert ttc(*elsewhere).json["tier"] == "remote"


def test_a_cache_folder_that_is_none_leaves_everything_in_memory(tmp_path: Path, module: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    answer = ttc("compile", module, "--json", "--cache-dir", blocked)
    assert answer.code == 0
    assert answer.json["tier"] == "compiled"
    assert answer.err.count("WARNING") == 1
    assert "keeping everything in memory" in answer.err


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path, module: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    answer = ttc("compile", module, "--json", "--cache-dir", shared)
    assert answer.code == 0
    assert "other users may write" in answer.err
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "second"), [("on", "disk"), ("off", "compiled"), ("read", "compiled"), ("record", "compiled")]
)
def test_modes(tmp_path: Path, module: Path, mode: str, second: str) -> None:
    environ = {"TORCHTPU_CACHE": mode}
    common = ["compile", module, "--json", "--cache-dir", tmp_path / "cache"]
    assert ttc(*common, environ=environ).json["tier"] == "compiled"
    assert ttc(*common, environ=environ).json["tier"] == second
    stored = ttc("cache", "ls", "--json", "--cache-dir", tmp_path / "cache").json["entries"]
    assert len(stored) == (1 if mode in ("on", "record") else 0)


def test_a_flag_that_changes_the_code_is_compiled_again_and_one_that_does_not_is_not(
    tmp_path: Path, module: Path
) -> None:
    common = ["compile", module, "--json", "--cache-dir", tmp_path / "cache"]
    tiers = [
        ttc(*common, environ={"XLA_FLAGS": flags}).json["tier"]
        for flags in (
            "",
            f"--xla_dump_to={tmp_path / 'dump'}",
            "--xla_cpu_enable_fast_math=true",
            f"--xla_cpu_enable_fast_math=true --xla_dump_to={tmp_path / 'elsewhere'}",
        )
    ]
    assert tiers == ["compiled", "disk", "compiled", "disk"]


def test_an_unknown_flag_kills_xla_and_nothing_else(tmp_path: Path, module: Path) -> None:
    answer = ttc(
        "compile", module, "--json", "--cache-dir", tmp_path / "cache", environ={"XLA_FLAGS": "--xla_no_such_flag=1"}
    )
    assert answer.code == 1
    assert "xla_no_such_flag" in answer.json["error"]


def test_an_interrupt_ends_the_command_and_its_helpers(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, "-m", "torchtpu_cache.cli.main", "compile", str(corpus / "jax_tfm48_adamw_step.mlirbc")]
    environ = {**os.environ, "TORCHTPU_CACHE_DIR": str(tmp_path / "cache")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        deadline = time.monotonic() + 60
        while not (helpers := _children(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _out, err = process.communicate(timeout=20)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in helpers):
        assert time.monotonic() < deadline, "a helper process outlived the command"
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.mark.tpu
def test_a_tpu_target_without_a_tpu(tmp_path: Path, module: Path) -> None:
    common = ["compile", module, "--json", "--target", "v5e:2x2", "--cache-dir", tmp_path / "cache"]
    assert ttc(*common).json["tier"] == "compiled"
    again = ttc(*common).json
    assert again["tier"] == "disk"
    assert again["executable_bytes"] > 50_000


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB with nothing left on it."""
    mount = tmp_path / "full"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "none", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"capability: this user cannot mount a small file system ({done.stderr.strip()})")
    try:
        (mount / "cache").mkdir(mode=0o700)
        with (mount / "theirs").open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 65536)
                file.flush()
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_costs_the_entry_and_not_the_compile(full_disk: Path, module: Path) -> None:
    answer = ttc("compile", module, "--json", "--cache-dir", full_disk / "cache")
    assert answer.code == 0, answer.err
    assert answer.json["tier"] == "compiled"
    assert "full" in answer.err or "No space left" in answer.err
    assert "Traceback" not in answer.err


def test_no_room_for_the_executable_is_one_sentence_and_leaves_nothing(
    full_disk: Path, tmp_path: Path, module: Path
) -> None:
    answer = ttc("compile", module, "--json", "--out", full_disk / "cache", "--cache-dir", tmp_path / "cache")
    assert answer.code == 1
    assert "No space left" in answer.json["error"]
    assert list((full_disk / "cache").iterdir()) == []
