"""The one assembly of a process, and who may make it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from support.waiting import wait_until
from torchtpu_cache import api


def test_a_fork_while_another_thread_makes_the_assembly_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(api, "_default", None)
    with api._default_lock.get():  # as a thread holds it that the fork leaves behind
        process = multiprocessing.get_context("fork").Process(target=api.default_assembly)
        process.start()
    process.join(timeout=30)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs
    assert process.exitcode == 0


class _StoredAtTheEnd:
    """Makes the assembly, and leaves a work to the end; also while multiprocessing unpickles it, as a script does
    that it imports anew."""

    def __init__(self, done: Path) -> None:
        self._done = done

    def __setstate__(self, state: dict[str, Path]) -> None:
        self.__dict__.update(state)
        api.default_assembly()

    def __call__(self) -> None:
        later = api.default_assembly().node._later
        assert later is not None

        def work() -> None:
            wait_until(lambda: later._state.get().flushing > 0, "nobody waits for it")
            self._done.touch()

        later.do(work, 1)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_of_multiprocessing_stores_what_waits_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(api, "_default", None)
    done = tmp_path / "done"
    process = multiprocessing.get_context(method).Process(target=_StoredAtTheEnd(done))
    process.start()
    process.join(timeout=60)
    process.kill()
    process.join()
    assert process.exitcode == 0
    assert done.exists()
