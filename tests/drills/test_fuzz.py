"""The fuzzers, for a few seconds each; `make fuzz` runs them for long."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = sorted((Path(__file__).parents[1] / "fuzz").glob("fuzz_*.py"))
SECONDS = 5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed: no wheel for here")
@pytest.mark.parametrize("target", TARGETS, ids=[path.stem for path in TARGETS])
def test_a_few_seconds_of_fuzzing_find_nothing(target: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(target), f"-max_total_time={SECONDS}", "-timeout=10", "-rss_limit_mb=2048"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert "Done" in answer.stderr, "it ran nothing"
