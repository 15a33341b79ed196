"""`torchtpu-cache demo`: the whole promise on one machine, with real programs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, Final

import typer

from torchtpu_cache.cli.options import Json
from torchtpu_cache.cli.output import (
    EXIT_FAILED,
    console,
    counted,
    fail,
    human_bytes,
    human_seconds,
    note,
    print_json,
    print_table,
)

TPU_TARGET: Final = "v5e:2x2"

_NEEDED_BY_THE_SERVICE: Final = ("fastapi", "prometheus_client", "uvicorn")


def demo(as_json: Json = False) -> None:
    """Compile on one machine, get everything from the cache on another.

    Eight programs for the CPU and for a real TPU v5e, in about a minute and a half. DEMO_FULL=1 takes all 28 programs;
    DEMO_TPU=0 leaves the TPU out.
    """
    from torchtpu_cache.demo.corpus import modules
    from torchtpu_cache.demo.play import play

    missing = [name for name in _NEEDED_BY_THE_SERVICE if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"the demo's service needs {missing[0]}, which is not here: pip install 'torchtpu-cache[server]'")
    files = modules(full=os.environ.get("DEMO_FULL") == "1")
    targets = ["cpu", *_tpu_target()]
    note(f"{len(files)} StableHLO programs for {' and '.join(targets)}; two machines and a service on this one")
    screen = console(stderr=True)
    if screen.is_terminal and not as_json:
        with screen.status("") as line:
            report = play(files, targets, lambda phase, step: line.update(f"{phase}: {step}"))
    else:
        report = play(files, targets, _phases_only())
    ok = report.outputs_equal and report.compiled_once
    if as_json:
        print_json({"targets": targets, **report.to_json()})
    else:
        _print(report.to_json())
    if not ok:
        failures = ", ".join(report.machines["a"]["failures"] + report.machines["b"]["failures"]) or "none was counted"
        note(f"error: machine B did not get every program as machine A made it; see above (failures: {failures})")
        raise typer.Exit(EXIT_FAILED)


def _phases_only() -> Callable[[str, str], None]:
    """One line per phase, for a log or a pipe."""
    said: set[str] = set()

    def show(phase: str, step: str) -> None:
        if phase not in said:
            said.add(phase)
            note(f"{phase}: {step}")

    return show


def _tpu_target() -> list[str]:
    from torchtpu_cache.compilers.registry import TPU, targets_here

    if os.environ.get("DEMO_TPU") == "0":
        return []
    for available in targets_here():
        if available.kind == TPU and not available.usable:
            note(f"leaving the TPU out: {available.problem}")
            return []
    return [TPU_TARGET]


def _print(report: dict[str, Any]) -> None:
    rows = [
        [
            row["program"],
            row["target"],
            human_seconds(row["compiled_seconds"]),
            human_seconds(row.get("remote_seconds")),
            human_seconds(row.get("disk_seconds")),
            human_seconds(row.get("memory_seconds")),
            human_seconds(row["seconds_saved"]),
            human_bytes(row["executable_bytes"]),
        ]
        for row in report["rows"]
    ]
    columns = ["program", "target", "compiled", "remote", "disk", "memory", "saved in\n3 runs", "size"]
    print_table(columns, rows, right=frozenset(range(2, 8)))
    machine_a, machine_b = report["machine_a"], report["machine_b"]
    hits = machine_b["hits"]
    stored = sum(row["entry_bytes"] for row in report["rows"])
    print(
        f"""
Machine A compiled {counted(machine_a["compiled"], "program")}; machine B compiled {machine_b["compiled"]}.
B got {hits["remote"]} from the remote, {hits["disk"]} from its disk and {hits["memory"]} from memory;
in 3 runs that saved it {human_seconds(report["seconds_saved"])} of compiling, for {human_bytes(stored)} stored."""
    )
    unequal = [f"{row['program']} for {row['target']}" for row in report["rows"] if not row["equal"]]
    if unequal:
        print(f"NOT equal to what A made, or to a run without a cache: {', '.join(unequal)}")
    else:
        print("CPU outputs equal those of a run without a cache, bit for bit.")
        if any(row["target"] != "cpu" for row in report["rows"]):
            print("TPU executables are byte for byte what A made.")
    print(f"Next: start `{_called()} serve`,\nand go on as README.md says under Use.")


def _called() -> str:
    """The command as this user would type it: `make demo` runs it without the environment being active."""
    return "torchtpu-cache" if shutil.which("torchtpu-cache") else os.path.relpath(sys.argv[0])
