"""A child may die, hang or talk: the caller gets one error, and the next call an answer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtpu_cache.compilers.children import ChildPool, check_options, child_environ, served, ticking
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.errors import CompilerCrashed, CompilerMissing, InvalidRequest

TESTS = Path(__file__).parents[2]
ENVIRON = {**os.environ, "PYTHONPATH": str(TESTS)}


@pytest.fixture
def pool() -> Iterator[ChildPool]:
    pool = ChildPool("support.unruly_child", size=1, deadline_seconds=60)
    yield pool
    pool.close()


def pid_of(pool: ChildPool, environ: dict[str, str] = ENVIRON, compiler: str = "c") -> int:
    answer, _ = pool.call(environ, compiler, {"do": "echo"})
    pid: int = answer["pid"]
    return pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_child_serves_many_calls(pool: ChildPool) -> None:
    assert pid_of(pool) == pid_of(pool)
    assert pool.call(ENVIRON, "c", {"do": "echo"}, b"\0" * 3_000_000)[1] == b"\0" * 3_000_000


def test_a_child_that_has_grown_too_large_is_ended_after_its_call() -> None:
    small = ChildPool("support.unruly_child", size=1, deadline_seconds=60, most_resident_bytes=1 << 20)
    try:
        first, second = pid_of(small), pid_of(small)
    finally:
        small.close()
    assert first != second
    assert not is_running(first)


def test_what_a_child_prints_does_not_reach_the_answer(pool: ChildPool) -> None:
    assert pool.call(ENVIRON, "c", {"do": "noise"}, b"payload") == ({}, b"payload")


def test_a_child_outlives_no_flag_file(pool: ChildPool, tmp_path: Path) -> None:
    """It has read the file for good; its variables only name it."""
    flags, environ = tmp_path / "flags", {"LIBTPU_INIT_ARGS": f"--flagfile={tmp_path / 'flags'}"}
    flags.write_text("--xla_a=1")
    first = Environment.snapshot(environ, [])
    flags.write_text("--xla_a=2")
    second = Environment.snapshot(environ, [])
    library = Path("/lib/libtpu.so")
    assert first.variables == second.variables
    pids = [pid_of(pool, compiler=served(library, "c" * 64, seen)) for seen in (first, first, second)]
    assert pids[0] == pids[1] != pids[2]


def test_a_python_error_is_an_answer_and_the_child_lives_on(pool: ChildPool) -> None:
    pid = pid_of(pool)
    assert pool.call(ENVIRON, "c", {"do": "raise", "message": "no such op"}) == ({"error": "no such op"}, b"")
    assert pid_of(pool) == pid


def test_a_compiler_that_the_child_cannot_import_is_missing(pool: ChildPool) -> None:
    with pytest.raises(CompilerMissing, match="pip install this"):
        pool.call(ENVIRON, "c", {"do": "missing", "message": "run: pip install this"})


def test_an_abort_costs_one_call_and_tells_the_reason(pool: ChildPool) -> None:
    pid = pid_of(pool)
    message = (
        "F1130 11:51:59.072629 5781 some.cc:234] Check failed: a == b\n*** Check failure stack trace: ***\n  @ 0x1\n"
    )
    with pytest.raises(CompilerCrashed, match=r"^the compiler's process died: Check failed: a == b$"):
        pool.call(ENVIRON, "c", {"do": "abort", "message": message})
    assert not is_running(pid)
    assert pid_of(pool) != pid


def test_a_child_that_is_killed_says_so(pool: ChildPool) -> None:
    with pytest.raises(CompilerCrashed, match="killed from outside"):
        pool.call(ENVIRON, "c", {"do": "killed"})


def test_a_child_that_somebody_killed_costs_a_second_try_and_no_job(pool: ChildPool, tmp_path: Path) -> None:
    first = pid_of(pool)
    spared_by = str(tmp_path / "killed once")
    answer, payload = pool.call(ENVIRON, "c", {"do": "killed", "spared_by": spared_by}, b"payload")
    assert payload == b"payload"
    assert answer["pid"] != first


def test_a_hung_child_is_ended_at_the_deadline(pool: ChildPool) -> None:
    pid = pid_of(pool)
    with pytest.raises(CompilerCrashed, match=r"did not finish within 0\.2 seconds"):
        pool.call(ENVIRON, "c", {"do": "hang"}, deadline_seconds=0.2)
    assert not is_running(pid)
    assert pid_of(pool) != pid


@pytest.mark.parametrize("changed", ["environment", "compiler"])
def test_another_environment_or_compiler_gets_another_child_and_ends_the_idle_one(
    pool: ChildPool, changed: str
) -> None:
    first = pid_of(pool)
    environ = {**ENVIRON, "XLA_FLAGS": "--a"} if changed == "environment" else ENVIRON
    second = pid_of(pool, environ, "other" if changed == "compiler" else "c")
    assert first != second
    assert not is_running(first)
    assert pool.pids() == [second]


def test_calls_beyond_the_size_wait_their_turn() -> None:
    pool = ChildPool("support.unruly_child", size=2, deadline_seconds=60)
    pids: list[int] = []
    threads = [threading.Thread(target=lambda: pids.append(pid_of(pool))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 6
    assert len(set(pids)) <= 2
    pool.close()
    assert not any(map(is_running, pids))


def test_closing_twice_is_harmless_and_leaves_no_process(pool: ChildPool) -> None:
    pid = pid_of(pool)
    pool.close()
    pool.close()
    assert not is_running(pid)


def test_a_child_does_not_import_from_the_working_directory(
    pool: ChildPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    environ = child_environ(ENVIRON, Environment.snapshot({}, ()), {})
    assert pid_of(pool, environ)


def test_a_childs_variables_are_the_requests() -> None:
    environment = Environment.snapshot({"XLA_FLAGS": "--xla_cpu_use_mkl_dnn=false", "TPU_MEGACORE": "1"}, ())
    environ = {
        "PATH": "/bin",
        "XLA_FLAGS": "--set_since",
        "LIBTPU_INIT_ARGS": "--set_since",
        "TF_XLA_FLAGS": "--set_since",
        "TPU_VISIBLE_CHIPS": "0",
        "TORCHTPU_CACHE_TOKEN": "secret",
    }
    assert child_environ(environ, environment, {"TPU_SKIP_MDS_QUERY": "1"}) == {
        "PATH": "/bin",
        "XLA_FLAGS": "--xla_cpu_use_mkl_dnn=false",
        "TPU_MEGACORE": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONSAFEPATH": "1",
    }


def test_progress_ticks_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtpu_cache.compilers.children._PROGRESS_SECONDS", 0.001)
    ticked = threading.Event()
    seen: list[float] = []

    def progress(seconds: float) -> None:
        seen.append(seconds)
        ticked.set()

    with ticking(progress):
        assert ticked.wait(10)
    assert seen == sorted(seen)
    assert not [thread for thread in threading.enumerate() if thread.name == "compile-progress"]


def test_a_display_that_fails_costs_no_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtpu_cache.compilers.children._PROGRESS_SECONDS", 0.001)
    failed = threading.Event()

    def progress(seconds: float) -> None:
        failed.set()
        raise OSError("the terminal is gone")

    with ticking(progress):
        assert failed.wait(10)


@pytest.mark.parametrize("options", [b"\xff\xff", b"\x1a\x02\xff\xff", b"\x1a\x40"], ids=["top", "nested", "cut"])
def test_options_that_are_no_message_are_refused(options: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no serialised CompileOptionsProto"):
        check_options(options)


def test_our_own_options_pass() -> None:
    check_options(encode_options(num_replicas=2, num_partitions=2, use_spmd_partitioning=True))
