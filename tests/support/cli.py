"""Runs the command line as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Each line of standard output as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on standard output."""
        (line,) = self.lines
        return line

    def one_sentence(self) -> str:
        """The error that a person reads: exactly one line, and no trace of Python."""
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, self.err
        assert "Traceback" not in self.err
        return errors[0].removeprefix("error: ")


def ttc(*arguments: str | Path, environ: Mapping[str, str] | None = None, timeout: float = 110) -> Answer:
    """`torchtpu-cache` with these arguments."""
    answer = subprocess.run(
        [sys.executable, "-m", "torchtpu_cache.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environ or {})},
    )
    return Answer(answer.returncode, answer.stdout, answer.stderr)
