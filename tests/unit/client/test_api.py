"""The one assembly of a process, and who may make it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from torchtpu_cache import api


def test_a_fork_while_another_thread_makes_the_assembly_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(api, "_default", None)
    with api._default_lock:  # as a thread holds it that the fork leaves behind
        process = multiprocessing.get_context("fork").Process(target=api.default_assembly)
        process.start()
    process.join(timeout=30)
    hangs = process.is_alive()
    process.kill()
    process.join()
    assert not hangs
    assert process.exitcode == 0
