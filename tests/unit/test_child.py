"""The helper process: answers, dies, hangs, and never takes its parent along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.waiting import wait_until
from torchtpu_cache_core.child import ChildDied, ChildProcess, ChildTimeout

TESTS = Path(__file__).parents[1]


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess("support.children", {**os.environ, "PYTHONPATH": str(TESTS)})
    yield made
    made.close()


def call(child: ChildProcess, do: str, payload: bytes = b"", deadline_seconds: float = 20.0) -> tuple[dict, bytes]:
    return child.call({"do": do}, payload, deadline_seconds=deadline_seconds)


def test_one_process_answers_many_requests_whatever_it_prints(child: ChildProcess) -> None:
    payload = os.urandom(3 << 20)
    answers = [call(child, "echo", payload) for _ in range(3)]
    assert all(answer[1] == payload for answer in answers)
    assert len({answer[0]["pid"] for answer in answers}) == 1


@pytest.mark.parametrize("do", ["abort", "raise"])
def test_a_death_is_told_with_its_last_words_and_the_next_call_starts_another(child: ChildProcess, do: str) -> None:
    first = call(child, "echo")[0]["pid"]
    with pytest.raises(ChildDied) as caught:
        call(child, do)
    assert ("last words" if do == "abort" else "an unexpected error") in caught.value.stderr_tail
    assert call(child, "echo")[0]["pid"] != first


@pytest.mark.parametrize("dies", [False, True])
def test_what_a_child_prints_is_bounded(child: ChildProcess, dies: bool) -> None:
    call(child, "echo")
    before = Path("/proc/self/statm").read_text().split()[1]
    request = {"do": "flood", "megabytes": 64, "dies": dies}
    if dies:
        with pytest.raises(ChildDied) as caught:
            child.call(request, deadline_seconds=60)
        assert len(caught.value.stderr_tail) == 64 << 10
        assert caught.value.stderr_tail.endswith("xxx" + "the last words")
    else:
        child.call(request, deadline_seconds=60)
    grown_pages = int(Path("/proc/self/statm").read_text().split()[1]) - int(before)
    assert grown_pages * os.sysconf("SC_PAGE_SIZE") < 16 << 20


def test_a_child_that_floods_is_ended_at_the_deadline(child: ChildProcess) -> None:
    call(child, "echo")
    with pytest.raises(ChildTimeout):
        child.call({"do": "flood", "megabytes": 1 << 40, "dies": False}, deadline_seconds=0.5)
    assert call(child, "echo", b"x")[1] == b"x"


def test_a_child_may_close_what_it_prints_into(child: ChildProcess) -> None:
    call(child, "silent")
    assert call(child, "nothing") == ({}, b"")


def test_a_hang_is_ended_at_the_deadline(child: ChildProcess) -> None:
    call(child, "echo")
    started = time.monotonic()
    with pytest.raises(ChildTimeout):
        call(child, "hang", deadline_seconds=0.5)
    assert time.monotonic() - started < 5
    assert call(child, "echo", b"x")[1] == b"x"


def test_a_module_that_does_not_exist_is_a_death() -> None:
    with pytest.raises(ChildDied) as caught:
        ChildProcess("support.no_such_module").call({}, deadline_seconds=20.0)
    assert "no_such_module" in caught.value.stderr_tail


def test_threads_share_one_child_without_mixing_answers(child: ChildProcess) -> None:
    payloads = [bytes([number]) * 100_000 for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda payload: call(child, "echo", payload)[1], payloads)) == payloads


def test_what_python_prints_at_its_start_breaks_no_frame(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('a banner of this site')")
    environ = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{tmp_path}"}
    with contextlib.closing(ChildProcess("support.children", environ)) as child:
        assert call(child, "echo", b"x")[1] == b"x"


def test_a_death_kills_no_parent_that_has_sigpipe_at_its_default() -> None:
    source = (
        "import signal\n"
        "from torchtpu_cache_core.child import ChildDied, ChildProcess\n"
        "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
        "try:\n"
        "    ChildProcess('support.no_such_module').call({}, bytes(4 << 20), deadline_seconds=20)\n"
        "except ChildDied:\n"
        "    print('survived')\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "survived\n")


@pytest.mark.parametrize(
    "prelude", ["os.close(0); os.close(1); os.close(2)", "os.mkdir('d'); os.chdir('d'); os.rmdir('../d')"]
)
def test_a_job_without_standard_descriptors_or_folder_has_helpers_all_the_same(tmp_path: Path, prelude: str) -> None:
    source = (
        "import os\n"
        "from torchtpu_cache_core.child import ChildProcess\n"
        f"{prelude}\n"
        "answer, payload = ChildProcess('support.children').call({'do': 'echo'}, b'x', deadline_seconds=20)\n"
        "os._exit(payload != b'x' or not answer['folder'])\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    assert subprocess.run([sys.executable, "-c", source], env=environ, cwd=tmp_path, timeout=60).returncode == 0


def test_no_descriptor_is_left_behind(child: ChildProcess) -> None:
    call(child, "echo")
    child.close()
    before = len(os.listdir("/proc/self/fd"))
    for do in ("echo", "abort", "echo"):
        with contextlib.suppress(ChildDied):
            call(child, do)
    child.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("do", ["hang", "busy"])
def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path, do: str) -> None:
    pid_file = tmp_path / "pid"
    source = (
        "from torchtpu_cache_core.child import ChildProcess\n"
        "child = ChildProcess('support.children')\n"
        f"child.call({{'do': {do!r}, 'pid_file': {str(pid_file)!r}}}, deadline_seconds=60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen([sys.executable, "-c", source], env=environ) as parent:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().isdecimal(), "the helper process did not start")
        pid = int(pid_file.read_text())
        wait_until(lambda: deep_in(do, pid), "the helper process did not get into the long operation")
        parent.kill()
    wait_until(lambda: not alive(pid), "the helper process outlived its parent")


@pytest.mark.parametrize("asks", [False, True])
def test_a_fork_keeps_no_child_of_its_parent_alive_and_starts_its_own(tmp_path: Path, asks: bool) -> None:
    pid_file, answered = tmp_path / "pids", tmp_path / "answered"
    source = (
        "import os, pathlib, signal, warnings\n"
        "from torchtpu_cache_core.child import ChildProcess\n"
        "warnings.simplefilter('error')\n"
        "child = ChildProcess('support.children')\n"
        "def pid(): return child.call({'do': 'echo'}, deadline_seconds=60)[0]['pid']\n"
        "first = pid()\n"
        "worker = os.fork()\n"
        "if not worker:\n"
        f"    own = pid() if {asks} else None\n"
        f"    pathlib.Path({str(answered)!r}).write_text(str(own != first))\n"
        "    signal.pause()\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(f'{{first}} {{worker}} .')\n"
        "signal.pause()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen([sys.executable, "-c", source], env=environ) as parent:
        wait_until(lambda: pid_file.exists() and pid_file.read_text().endswith("."), "the helper process did not start")
        first, worker = map(int, pid_file.read_text().split()[:2])
        wait_until(lambda: answered.exists() and answered.read_text() != "", "the fork got no answer")
        assert alive(first), "a fork must not end the child that its parent uses"
        parent.kill()
    try:
        assert answered.read_text() == "True"
        assert alive(worker)
        wait_until(lambda: not alive(first), "a fork kept the helper process of its dead parent alive")
    finally:
        os.kill(worker, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return stat_of(pid)[0] != "Z"
    except FileNotFoundError:
        return False


def deep_in(do: str, pid: int) -> bool:
    """Whether the process sleeps, or has computed for a second: it takes far less to start."""
    state, *fields = stat_of(pid)
    return state == "S" if do == "hang" else int(fields[10]) >= os.sysconf("SC_CLK_TCK")


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
