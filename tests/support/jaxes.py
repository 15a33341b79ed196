"""The environments with JAX on this machine, and machines of a fleet that run jobs in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "integration" / "jax"
ENVIRONMENTS = (".venv", ".venv-other", ".venv-jax-0.6.2", ".venv-jax-0.4.30")
_SECONDS = 100


def python_of(environment: str) -> str:
    """Its interpreter; skips the test where it is absent, which in CI is a failure."""
    if environment == ".venv":
        return sys.executable
    python = ROOT / environment / "bin" / "python"
    if not (ROOT / environment / "stamp").is_file():
        pytest.skip(f"the environment {environment} is absent: make {environment}/stamp says what it needs")
    return str(python)


@dataclass
class Machine:
    """A machine with its own home, cache folder and working folder."""

    folder: Path
    python: str
    remote: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def run(self, script: Path, *words: str, **variables: str) -> Any:
        """What the script prints last, from JSON."""
        return json.loads(self.text(script, *words, **variables).splitlines()[-1])

    def text(self, script: Path, *words: str, **variables: str) -> str:
        """What the script prints; its standard error is in the message where it fails."""
        for name in ("home", "work"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        paths = (variables.pop("PYTHONPATH", None), str(JOBS), os.environ.get("PYTHONPATH"))
        environ = {
            **os.environ,
            "HOME": str(self.folder / "home"),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCHTPU_CACHE_DIR": str(self.cache),
            "TORCHTPU_CACHE_JAX": "1",
            "TORCHTPU_CACHE_REMOTE": self.remote,
            **self.variables,
            **variables,
        }
        done = subprocess.run(
            [self.python, "-W", "error::UserWarning", str(script), *words],
            cwd=self.folder / "work",
            env={name: value for name, value in environ.items() if value or name == "TORCHTPU_CACHE_REMOTE"},
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout


def files_of(cache: Path) -> Iterator[Path]:
    """Every entry of a machine's disk tier, as its file."""
    yield from sorted((cache / "entries").rglob("ttc1-*"))
