"""Fixtures of the canonicalisation tests: the corpus, a running canonicaliser, and other interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import torchtpu_cache_core
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser

REPOSITORY = Path(__file__).resolve().parents[3]
CORE_ROOT = str(Path(torchtpu_cache_core.__file__).resolve().parents[1])

RunPython = Callable[..., Any]


@pytest.fixture(scope="session")
def modules() -> list[Path]:
    """The corpus's programs, bytecode and text."""
    corpus = REPOSITORY / "tests" / "data" / "corpus"
    found = sorted([*corpus.glob("*.mlirbc"), *corpus.glob("*.mlir")])
    assert len(found) == 29
    return found


@pytest.fixture(scope="module")
def canonicaliser() -> Iterator[ProgramCanonicaliser]:
    resolver = ProgramCanonicaliser(None)
    yield resolver
    resolver.close()


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Runs a script in a fresh interpreter and gives the JSON that it prints last."""

    def run(
        script: str, *args: str, python: str = sys.executable, environ: Mapping[str, str] = {}, cwd: Path | None = None
    ) -> Any:
        done = subprocess.run(
            [python, "-c", script, *args],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": CORE_ROOT, **environ},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def other_jaxlib_python() -> str:
    """An interpreter with another jaxlib release than this one."""
    named = os.environ.get("TTC_OTHER_JAXLIB_PYTHON")
    python = Path(named) if named else REPOSITORY / ".venv-other" / "bin" / "python"
    if not python.is_file():
        pytest.skip("no interpreter with another jaxlib: set TTC_OTHER_JAXLIB_PYTHON or make .venv-other")
    return str(python)
