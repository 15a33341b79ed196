"""examples/jax_train.py on two machines: the second compiles nothing, and learns the same to the last bit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.jaxes import ROOT, Machine
from support.service import running_service

EXAMPLE = ROOT / "examples" / "jax_train.py"

# What sitecustomize would do: the example itself reports nothing of the cache.
REPORT = """
import atexit, json, os, sys
def report():
    plug = sys.modules.get("torchtpu_cache.jax.plug")
    with open(os.environ["REPORT"], "w") as file:
        json.dump(plug and plug.stats(), file)
atexit.register(report)
"""


def losses(machine: Machine) -> tuple[list[str], dict[str, object]]:
    hooks = machine.folder / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "sitecustomize.py").write_text(REPORT)
    report = machine.folder / "report.json"
    text = machine.text(EXAMPLE, PYTHONPATH=str(hooks), REPORT=str(report))
    return [line for line in text.splitlines() if line.startswith("step")], json.loads(report.read_text())


def test_the_second_machine_compiles_nothing_and_learns_the_same(tmp_path: Path) -> None:
    assert "torchtpu_cache" not in EXAMPLE.read_text()
    with running_service(tmp_path / "service") as service:
        first, cold = losses(Machine(tmp_path / "a", sys.executable, remote=service.url))
        second, warm = losses(Machine(tmp_path / "b", sys.executable, remote=service.url))
    assert len(first) == 10
    assert first == second
    assert (cold["hits"], cold["compiled"]) == ({}, 2)
    assert (warm["hits"], warm["compiled"]) == ({"remote": 2}, 0)
