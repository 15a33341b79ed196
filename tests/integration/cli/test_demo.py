"""The demo, with two of its programs: A compiles, B gets everything from each tier in turn, and results are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cli import ttc
from torchtpu_cache.cli import demo
from torchtpu_cache.demo.corpus import DEFAULT_MODULES, modules
from torchtpu_cache.demo.play import play


@pytest.mark.slow
@pytest.mark.tpu
def test_two_machines_and_a_service(corpus: Path) -> None:
    said: list[str] = []
    files = [corpus / "jax_mlp4_sgd_step.mlirbc", corpus / "torchtpu_zoo_0.mlirbc"]
    report = play(files, ["cpu", "v5e:2x2"], lambda phase, step: said.append(f"{phase}: {step}"))
    answer = report.to_json()
    assert answer["programs"] == 4
    assert answer["machine_a"] == {"compiled": 4}
    assert answer["machine_b"] == {"compiled": 0, "hits": {"memory": 4, "disk": 4, "remote": 4}}
    assert answer["outputs_equal"] is True
    assert answer["seconds_saved"] > 0
    assert report.compiled_once
    assert report.machines["b"]["failures"] == []
    assert any("machine B" in line for line in said)
    for row in answer["rows"]:
        assert row["remote_seconds"] > 0
        assert row["disk_seconds"] > 0
        assert row["memory_seconds"] > 0


def _report(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "rows": list(rows),
        "machine_a": {"compiled": len(rows)},
        "machine_b": {"compiled": 0, "hits": {"remote": len(rows), "disk": len(rows), "memory": len(rows)}},
        "seconds_saved": 1055.3,
    }


def _row(program: str, target: str, equal: bool = True) -> dict[str, Any]:
    seconds = {"compiled_seconds": 65.2, "remote_seconds": 0.111, "disk_seconds": 0.0985, "memory_seconds": 0.0123}
    sizes = {"executable_bytes": 99_900_000, "entry_bytes": 12_000_000}
    return {"program": program, "target": target, "seconds_saved": 191.0, "equal": equal, **seconds, **sizes}


def test_the_table_fits_80_columns_with_every_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", [".venv/bin/torchtpu-cache", "demo"])
    names = [path.stem for path in modules(full=True)]
    demo._print(_report(*(_row(name, target) for name in names for target in ("cpu", "v5e:2x2"))))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[3 : 3 + 2 * len(names)]] == [name for name in names for _ in range(2)]


def test_the_footer_names_what_is_unequal_and_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    demo._print(_report(_row("one", "cpu"), _row("two", "cpu")))
    good = capsys.readouterr().out
    assert "in 3 runs" in good
    assert "bit for bit" in good
    assert "TPU" not in good
    demo._print(_report(_row("one", "cpu"), _row("two", "v5e:2x2", equal=False)))
    bad = capsys.readouterr().out
    assert "NOT equal" in bad
    assert "two for v5e:2x2" in bad
    assert "bit for bit" not in bad


def test_what_to_type_next_is_on_the_path_or_named_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tmp_path / "environment" / "bin" / "torchtpu-cache"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(command), "demo"])
    monkeypatch.setenv("PATH", str(command.parent))
    demo._print(_report(_row("one", "cpu")))
    assert "start `torchtpu-cache serve`," in capsys.readouterr().out
    monkeypatch.setenv("PATH", str(tmp_path))
    demo._print(_report(_row("one", "cpu")))
    assert "start `environment/bin/torchtpu-cache serve`," in capsys.readouterr().out


def test_without_the_service_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    answer = ttc("demo", environ={"PYTHONPATH": str(tmp_path)})
    assert answer.code == 1
    assert "pip install 'torchtpu-cache[server]'" in answer.one_sentence()


def test_a_log_gets_one_line_per_phase(capsys: pytest.CaptureFixture[str]) -> None:
    show = demo._phases_only()
    for number in range(5):
        show("machine A", f"{number}/4")
    show("machine B", "4 programs …")
    assert capsys.readouterr().err == "machine A: 0/4\nmachine B: 4 programs …\n"


def test_eight_programs_by_default_and_all_when_asked() -> None:
    assert [path.stem for path in modules(full=False)] == sorted(DEFAULT_MODULES)
    assert len(modules(full=True)) == 28
