"""The helper process: answers, dies, hangs, and never takes its parent along."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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


def test_the_child_ends_when_its_parent_is_killed() -> None:
    source = (
        "import sys, time\n"
        "from torchtpu_cache_core.child import ChildProcess\n"
        "child = ChildProcess('support.children')\n"
        "print(child.call({'do': 'echo'}, deadline_seconds=20)[0]['pid'], flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the helper process outlived its parent"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
