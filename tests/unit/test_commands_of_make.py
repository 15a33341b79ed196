"""The Makefile and its scripts: each benchmark fetches what it needs alone, and nothing of the machine is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def planned(*words: str) -> str:
    """What make would do."""
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


@pytest.mark.parametrize(
    ("words", "fetches"), [((), True), (("ONLY=blob_get alias",), True), (("ONLY=startup",), False)]
)
def test_only_the_benchmark_that_needs_nginx_fetches_it(words: tuple[str, ...], fetches: bool) -> None:
    assert ("nginx.sh" in planned("bench", *words)) is fetches


@pytest.mark.parametrize("kind", ["drills", "bench"])
def test_figures_of_short_forms_are_kept_apart(kind: str) -> None:
    assert f"--short --out .bench/{kind}-short.jsonl" in planned(kind, "SHORT=1", "ONLY=kill")
    for words in ((), ("SHORT=0",)):
        assert f"--out .bench/{kind}.jsonl" in planned(kind, *words)
        assert "--short" not in planned(kind, *words)


def fetched(folder: Path, apt_get: str) -> subprocess.CompletedProcess[str]:
    """scripts/nginx.sh where apt-get is this script."""
    if shutil.which("nginx", path="/usr/sbin:/usr/bin:/bin") is not None:
        pytest.skip("capability: nginx is installed here, and nothing is to be fetched")
    fakes = folder / "bin"
    fakes.mkdir()
    for name, text in (("apt-get", apt_get), ("dpkg", 'mkdir -p "$3/usr/sbin" && cp "$2" "$3/usr/sbin/nginx"')):
        (fakes / name).write_text(f"#!/bin/sh\n{text}\n")
        (fakes / name).chmod(0o755)
    command = [str(ROOT / "scripts" / "nginx.sh"), str(folder / "nginx")]
    environ = {**os.environ, "PATH": f"{fakes}:/usr/bin:/bin"}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=60)


def test_lists_of_packages_are_fetched_into_a_folder_of_our_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""echo "$@" >>{log}
case "$*" in *Dir::State=*download*) echo >nginx_1.deb;; *Dir::State=*update) ;; *) exit 100;; esac"""
    fetched(tmp_path, script)
    assert (tmp_path / "nginx" / "usr" / "sbin" / "nginx").is_file()
    plain, update, again = log.read_text().splitlines()
    assert plain == "-qq download nginx"
    for line in (update, again):
        assert "-o Dir::State=/" in line
        assert "-o Dir::Cache=/" in line


def test_without_nginx_one_line_says_so_and_all_goes_on(tmp_path: Path) -> None:
    done = fetched(tmp_path, "exit 100")
    assert done.stderr.splitlines() == [
        "going on without nginx (its package cannot be fetched); the benchmark blob_get needs it"
    ]
    assert not (tmp_path / "nginx").exists()
