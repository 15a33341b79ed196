"""`torchtpu_cache.compile` in a process of its own, as a job calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.cli import ttc
from support.service import running_service

MODULE = "jax_add.mlirbc"

JOB = """
import json, sys
from pathlib import Path
import torchtpu_cache
program = torchtpu_cache.compile(Path(sys.argv[1]))
again = torchtpu_cache.compile(Path(sys.argv[1]).read_bytes(), target="cpu")
loaded = program.load()
outputs = loaded.execute([__import__("numpy").ones(s.dimensions, s.dtype) for s in loaded.parameter_shapes()])
print(json.dumps({"tiers": [program.tier, again.tier], "key": program.key, "sum": float(outputs[0].sum()),
                  "bytes": len(program.executable), "repr": len(repr(program))}))
"""


def job(module: Path, environ: Mapping[str, str] | None = None) -> tuple[dict[str, object], str]:
    answer = subprocess.run(
        [sys.executable, "-c", JOB, str(module)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={**os.environ, **(environ or {})},
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout), answer.stderr


def test_a_job_compiles_loads_and_runs(corpus: Path) -> None:
    first, _ = job(corpus / MODULE)
    second, _ = job(corpus / MODULE)
    assert first["tiers"] == ["compiled", "memory"]
    assert second["tiers"] == ["disk", "memory"]
    assert first["key"] == second["key"]
    assert first["sum"] == second["sum"]
    assert int(str(first["repr"])) < 1000


def test_a_job_and_a_command_share_entries_through_the_service(corpus: Path, tmp_path: Path) -> None:
    with running_service(tmp_path / "service") as service:
        environ = {"TORCHTPU_CACHE_REMOTE": service.url, "TORCHTPU_CACHE_DIR": str(tmp_path / "a")}
        assert job(corpus / MODULE, environ)[0]["tiers"] == ["compiled", "memory"]
        command = ["compile", corpus / MODULE, "--json", "--remote", service.url, "--cache-dir", tmp_path / "b"]
        assert ttc(*command).json["tier"] == "remote"


def test_what_was_compiled_before_there_was_a_remote_reaches_it(corpus: Path, tmp_path: Path) -> None:
    module = corpus / "jax_mlp4_sgd_step.mlirbc"
    common = ["compile", module, "--json", "--cache-dir"]
    assert ttc(*common, tmp_path / "a").json["tier"] == "compiled"
    with running_service(tmp_path / "service") as service:
        assert ttc(*common, tmp_path / "a", "--remote", service.url).json["tier"] == "disk"
        assert ttc(*common, tmp_path / "b", "--remote", service.url).json["tier"] == "remote"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TORCHTPU_CACHE_FUTURE", "1"),
        ("TORCHTPU_CACHE_REMOTE", "http://192.0.2.1:8077"),
        ("TORCHTPU_CACHE_MAX_DISK_BYTES", "plenty"),
        ("TORCHTPU_CACHE_CUSTOM_CALL_TARGETS", "xla_ffi_python_cpu_callback"),
    ],
)
def test_a_setting_without_sense_never_stops_a_job(corpus: Path, variable: str, value: str) -> None:
    answer, said = job(corpus / MODULE, {variable: value})
    assert answer["tiers"] == ["compiled", "memory"]
    assert said.count("going on without that setting") == 1


def test_a_files_name_is_not_taken_for_a_program(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchtpu_cache

    with pytest.raises(torchtpu_cache.InvalidRequest, match=r"pass pathlib\.Path"):
        torchtpu_cache.compile(str(corpus / MODULE))
