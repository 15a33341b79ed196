"""The load client in C (`load.c`), built where it is needed, and what it says of one run."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Connections that ask for one path again and again.

    Args:
        body_bytes: what every answer must have.
        heads_differ: every request has a header of its own.
    """

    connections: int
    path: str
    body_bytes: int
    heads_differ: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one group got. `answers` ended in time; `bytes` counts those that had not ended as well."""

    answers: int
    bytes: int
    seconds: float
    p50_ms: float
    p99_ms: float
    max_ms: float


class LoadClient:
    """The client, compiled by gcc into a folder.

    Args:
        cpu: the one that it runs on; None leaves that to the kernel.
    """

    def __init__(self, folder: Path, cpu: int | None) -> None:
        self._program = folder / "load"
        self._cpu = cpu
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(self._program), str(_SOURCE)]
        subprocess.run(command, check=True)

    def run(self, port: int, seconds: float, *groups: Group) -> list[Load]:
        """What each group got. CalledProcessError where an answer was not as it had to be."""
        texts = [f"{g.connections}:{g.body_bytes}:{'!' * g.heads_differ}{g.path}" for g in groups]
        cpu = self._cpu
        done = subprocess.run(
            [str(self._program), str(port), str(seconds), *texts],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            preexec_fn=None if cpu is None else lambda: os.sched_setaffinity(0, {cpu}),
        )
        return [Load(**json.loads(line)) for line in done.stdout.splitlines()]


def cpu_seconds(pid: int) -> float:
    """What the threads of a process that live now have run, user and kernel, in nanosecond steps."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
