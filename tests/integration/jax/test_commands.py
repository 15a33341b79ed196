"""What the commands say of JAX: doctor tries an installed one, and entries of its programs are shown like any other."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from support.cli import ttc
from support.jaxes import JOBS, Machine
from support.service import running_service
from torchtpu_cache.cli import doctor


def jax_check(environ: dict[str, str]) -> dict[str, str]:
    answer = ttc("doctor", "--json", environ=environ)
    assert answer.code == 0, answer.out
    return next(check for check in answer.json["checks"] if check["name"] == "jax")


def test_doctor_says_that_jax_takes_the_adapter(tmp_path: Path) -> None:
    check = jax_check({"TORCHTPU_CACHE_JAX": "1"})
    assert check["status"] == "ok"
    assert "jobs with it use this cache" in check["detail"]
    assert "no job uses this cache" in jax_check({"TORCHTPU_CACHE_JAX": "1", "TORCHTPU_CACHE": "off"})["detail"]


def test_doctor_says_that_jax_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else found(name))
    (check,) = (check for check in doctor.examine({}) if check.name == "jax")
    assert (check.status, check.detail.partition(",")[0]) == ("ok", "not installed")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("__version__ = '99'\nclass config: values = {}\n", "99 is not served: jax 99 has no jax._src.compiler"),
        ("raise RuntimeError('made to fail')\n", "RuntimeError: made to fail"),
        ("import os; os._exit(3)\n", "it said nothing"),
    ],
)
def test_doctor_warns_of_a_jax_that_does_not(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(source)
    check = jax_check({"PYTHONPATH": str(tmp_path)})
    assert check["status"] == "warning"
    assert says in check["detail"]


def test_entries_of_jax_are_listed_shown_and_verified(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a", sys.executable)
    machine.run(JOBS / "job.py", "programs")
    at = ("--cache-dir", machine.cache)
    listed = ttc("cache", "ls", "--json", *at).json["entries"]
    assert {entry["program"] for entry in listed} == {"jit_train", "jit_spectrum", "jit_rolled"}
    assert "jit_train" in ttc("cache", "ls", *at).out
    shown = ttc("cache", "show", "jit_train", "--json", *at).json
    assert shown["key"] == next(entry["key"] for entry in listed if entry["program"] == "jit_train")
    assert (shown["executable_format"], shown["codec"]) == ("jax-cache", "raw")
    assert ttc("cache", "verify", "--json", *at).json["entries"] == 3


def test_names_that_this_machine_knows_stand_beside_the_entries_of_the_service(tmp_path: Path) -> None:
    with running_service(tmp_path / "service") as service:
        machine = Machine(tmp_path / "a", sys.executable, remote=service.url)
        machine.run(JOBS / "job.py", "programs")
        at = ("--at-remote", "--remote", service.url)
        listed = ttc("cache", "ls", "--json", *at, "--cache-dir", machine.cache).json["entries"]
        assert {entry["program"] for entry in listed} == {"jit_train", "jit_spectrum", "jit_rolled"}
        elsewhere = ttc("cache", "ls", "--json", *at, "--cache-dir", tmp_path / "b").json["entries"]
        assert [entry["key"] for entry in elsewhere] == [entry["key"] for entry in listed]
        assert {entry["program"] for entry in elsewhere} == {""}


def test_a_name_that_several_entries_have_is_refused_with_their_keys(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "a", sys.executable)
    for flags in ("", "--xla_cpu_enable_fast_math=true"):
        machine.run(JOBS / "job.py", "programs", XLA_FLAGS=flags)
    answer = ttc("cache", "show", "jit_train", "--cache-dir", machine.cache)
    assert answer.code == 2
    keys = re.findall("ttc1-[0-9a-f]{12}", answer.one_sentence())
    assert len(keys) == 2
    assert ttc("cache", "show", keys[0], "--cache-dir", machine.cache).code == 0
