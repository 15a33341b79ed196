"""Plays the demo: a service, machine A, machine B twice, and a run without any cache to compare with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtpu_cache_core.config import VARIABLE_PREFIX
from torchtpu_cache_core.errors import CacheError

Show = Callable[[str, str], None]
"""Told which phase runs, and how far it is."""


@dataclass(slots=True)
class Report:
    """What the demo found.

    Args:
        rows: one per program and target, with what each machine's tiers took.
        machines: the counters of each machine, summed over its processes.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def outputs_equal(self) -> bool:
        """CPU outputs equal those of the uncached run bit for bit, and TPU executables of A and B are the same."""
        return bool(self.rows) and all(row["equal"] for row in self.rows)

    @property
    def compiled_once(self) -> bool:
        """Machine A compiled every program, machine B none, and each tier answered for every one."""
        hits = self.machines["b"]["hits"]
        every_tier = all(hits.get(tier) == len(self.rows) for tier in ("remote", "disk", "memory"))
        return self.machines["a"]["compiled"] == len(self.rows) and self.machines["b"]["compiled"] == 0 and every_tier

    def to_json(self) -> dict[str, Any]:
        machine_a, machine_b = self.machines["a"], self.machines["b"]
        return {
            "programs": len(self.rows),
            "machine_a": {"compiled": machine_a["compiled"]},
            "machine_b": {
                "compiled": machine_b["compiled"],
                "hits": {tier: machine_b["hits"].get(tier, 0) for tier in ("memory", "disk", "remote")},
            },
            "outputs_equal": self.outputs_equal,
            "seconds_saved": round(machine_b["seconds_saved"], 3),
            "rows": self.rows,
        }


def play(files: list[Path], targets: list[str], show: Show) -> Report:
    """Runs the whole demo in a temporary folder.

    Raises:
        CacheError: a process of the demo failed; its last words are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="torchtpu-cache-demo-") as folder:
        root = Path(folder)
        with _service(root / "service") as url:
            runs: dict[str, list[dict[str, Any]]] = {}
            for name, title, machine, extra in (
                ("a", "machine A compiles and publishes", "machine-a", ["--remote", url]),
                ("b", "machine B, from the remote", "machine-b", ["--remote", url, "--run"]),
                (
                    "b_again",
                    "machine B, from disk, then memory",
                    "machine-b",
                    ["--remote", url, "--passes", "2"],
                ),
            ):
                runs[name] = list(_machine(title, root / machine, files, targets, extra, show))
        reference = ["--mode", "off", "--run"]
        runs["uncached"] = list(_machine("the CPU without a cache", root / "uncached", files, ["cpu"], reference, show))
    return _report(runs)


@contextmanager
def _service(data_dir: Path) -> Iterator[str]:
    command = ["serve", "--listen", "127.0.0.1:0", "--data-dir", str(data_dir), "--json"]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [sys.executable, "-m", "torchtpu_cache.cli.main", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environ(),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise CacheError(f"the service did not start: {_last_line(errors.read())}")
            yield json.loads(line)["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def _machine(
    title: str, cache_dir: Path, files: list[Path], targets: list[str], extra: list[str], show: Show
) -> Iterator[dict[str, Any]]:
    """The lines that one process of a machine printed."""
    command = [sys.executable, "-m", "torchtpu_cache.demo.machine", "--cache-dir", str(cache_dir), *extra]
    for target in targets:
        command += ["--target", target]
    total = len(files) * len(targets) * (int(extra[extra.index("--passes") + 1]) if "--passes" in extra else 1)
    show(title, f"{total} programs …")
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [*command, *map(str, files)], stdout=subprocess.PIPE, stderr=errors, text=True, env=_environ()
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for number, line in enumerate(process.stdout, 1):
                answer = json.loads(line)
                if "program" in answer:
                    show(title, f"{number}/{total} {answer['program']} {answer['target']}")
                yield answer
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            errors.seek(0)
            raise CacheError(f"{title}: the process ended with {process.returncode}: {_last_line(errors.read())}")


def _environ() -> dict[str, str]:
    """Settings of the person who runs the demo must not reach its machines, nor its service."""
    return {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE_PREFIX)}


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _report(runs: dict[str, list[dict[str, Any]]]) -> Report:
    report = Report()
    lines = {
        (name, line["pass"], line["target"], line["program"]): line
        for name, run in runs.items()
        for line in run
        if "program" in line
    }
    for (name, number, target, program), made in lines.items():
        if name != "a" or number != 1:
            continue
        remote = lines["b", 1, target, program]
        again = [lines["b_again", number, target, program] for number in (1, 2)]
        if target == "cpu":
            equal = remote["outputs_sha256"] == lines["uncached", 1, target, program]["outputs_sha256"]
        else:
            equal = True
        equal = equal and all(line["executable_sha256"] == made["executable_sha256"] for line in (remote, *again))
        report.rows.append(
            {
                "program": program,
                "target": target,
                "compiled_seconds": made["seconds"],
                **{f"{line['tier']}_seconds": line["seconds"] for line in (remote, *again)},
                "seconds_saved": sum(line["seconds_saved"] for line in (remote, *again)),
                "executable_bytes": made["executable_bytes"],
                "entry_bytes": made["entry_bytes"],
                "equal": equal,
            }
        )
    for machine, names in (("a", ["a"]), ("b", ["b", "b_again"])):
        counters = [line["counters"] for name in names for line in runs[name] if "counters" in line]
        hits: dict[str, int] = {}
        for one in counters:
            for tier, count in one["hits"].items():
                hits[tier] = hits.get(tier, 0) + count
        report.machines[machine] = {
            "compiled": sum(one["compiled"] for one in counters),
            "hits": hits,
            "failures": sorted({name for one in counters for name in one["failures"]}),
            "seconds_saved": sum(one["seconds_saved"] for one in counters),
        }
    return report
