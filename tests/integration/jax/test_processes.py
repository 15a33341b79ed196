"""A job of two processes: each looks up and publishes what runs on its own devices, and nothing that spans both."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.jaxes import ENVIRONMENTS, JOBS, Machine, files_of, python_of


def run_both(machine: Machine) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with ThreadPoolExecutor(2) as pool:
        variables = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
        running = [pool.submit(machine.run, JOBS / "span_job.py", port, str(rank), **variables) for rank in range(2)]
        return [future.result() for future in running]


@pytest.mark.parametrize("environment", ENVIRONMENTS[:2])
def test_every_process_has_its_own_programs_and_none_that_spans(environment: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", python_of(environment))
    cold = run_both(machine)
    for report in cold:
        assert report["total"] == 0 + 1 + 3 + 6
        assert report["stats"]["bypassed"]["spans_processes"] >= 1
        assert report["stats"]["hits"] == {}
    # Rank 1 too has stored its programs; JAX itself lets only rank 0 write.
    compiled = sum(report["stats"]["compiled"] - report["stats"]["bypassed"]["spans_processes"] for report in cold)
    assert len(list(files_of(machine.cache))) == compiled
    warm = run_both(machine)
    for before, report in zip(cold, warm, strict=True):
        assert (report["own"], report["total"]) == (before["own"], before["total"])
        spanning = report["stats"]["bypassed"]["spans_processes"]
        assert report["stats"]["compiled"] == spanning == before["stats"]["bypassed"]["spans_processes"]
        assert report["stats"]["hits"].get("disk", 0) == report["stats"]["requests"] - spanning
