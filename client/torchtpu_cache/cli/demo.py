"""`torchtpu-cache demo`: the whole promise on one machine, with real programs."""

from __future__ import annotations

import os
from typing import Any

import typer

from torchtpu_cache.cli.options import Json
from torchtpu_cache.cli.output import (
    EXIT_FAILED,
    console,
    human_bytes,
    human_seconds,
    note,
    print_json,
    print_table,
)

TPU_TARGET = "v5e:2x2"


def demo(as_json: Json = False) -> None:
    """Compile on one machine, get everything from the cache on another.

    Eight programs for the CPU and for a real TPU v5e in two to three minutes. DEMO_FULL=1 takes all 28 programs;
    DEMO_TPU=0 leaves the TPU out.
    """
    from torchtpu_cache.demo.corpus import modules
    from torchtpu_cache.demo.play import play

    files = modules(full=os.environ.get("DEMO_FULL") == "1")
    targets = ["cpu", *_tpu_target()]
    note(f"{len(files)} StableHLO programs for {' and '.join(targets)}; two machines and a service on this one")
    screen = console(stderr=True)
    if screen.is_terminal and not as_json:
        with screen.status("") as line:
            report = play(files, targets, line.update)
    else:
        report = play(files, targets, note)
    ok = report.outputs_equal and report.compiled_once
    if as_json:
        print_json({"targets": targets, **report.to_json()})
    else:
        _print(report.to_json())
    if not ok:
        failures = ", ".join(report.machines["a"]["failures"] + report.machines["b"]["failures"]) or "none was counted"
        note(f"error: machine B did not get every program as machine A made it; see the table (failures: {failures})")
        raise typer.Exit(EXIT_FAILED)


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
            "yes" if row["equal"] else "NO",
        ]
        for row in report["rows"]
    ]
    columns = ["program", "target", "compiled", "remote", "disk", "memory", "saved", "bytes", "equal"]
    print_table(columns, rows, right=frozenset(range(2, 8)))
    machine_a, machine_b = report["machine_a"], report["machine_b"]
    hits = machine_b["hits"]
    stored = sum(row["entry_bytes"] for row in report["rows"])
    print(
        f"""
machine A compiled {machine_a["compiled"]} programs; machine B compiled {machine_b["compiled"]}.
B got {hits["remote"]} from the remote, {hits["disk"]} from its disk and {hits["memory"]} from memory;
that saved it {human_seconds(report["seconds_saved"])} of compiling, for {human_bytes(stored)} at the service."""
    )
    if report["outputs_equal"]:
        print("equal: CPU outputs are those of a run without a cache, bit for bit;")
        print("       TPU executables are byte for byte what A made")
    else:
        print("NOT equal: see the last column")
