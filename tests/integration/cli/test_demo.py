"""The demo, with two of its programs: A compiles, B gets everything from each tier in turn, and results are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtpu_cache.demo.corpus import DEFAULT_MODULES, modules
from torchtpu_cache.demo.play import play


@pytest.mark.slow
@pytest.mark.tpu
def test_two_machines_and_a_service(corpus: Path) -> None:
    said: list[str] = []
    files = [corpus / "jax_mlp4_sgd_step.mlirbc", corpus / "torchtpu_zoo_0.mlirbc"]
    report = play(files, ["cpu", "v5e:2x2"], said.append)
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


def test_eight_programs_by_default_and_all_when_asked() -> None:
    assert [path.stem for path in modules(full=False)] == sorted(DEFAULT_MODULES)
    assert len(modules(full=True)) == 28
