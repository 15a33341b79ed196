"""The distribution: what is in the wheel, what a bare install imports, what the checkers see."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torchtpu_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # hatchling is there as the build back end of the editable install's environment; no network is asked for.
    build = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    answer = subprocess.run(
        [sys.executable, "-c", build, str(out)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return out / answer.stdout.split()[-1]


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"torchtpu_cache_core", "torchtpu_cache", "torchtpu_cache_server"}
    for package in tops:
        assert f"{package}/py.typed" in names
    licences = [name for name in names if name.endswith("LICENSE")]
    assert len(licences) == 1


def test_the_wheel_holds_every_source_file_and_the_modules_of_the_demo(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for root in ("cache", "client", "server"):
        for path in (ROOT / root).rglob("*.py"):
            assert str(path.relative_to(ROOT / root)) in names
    assert "torchtpu_cache/demo/modules/torch_llama2_fwd.mlirbc" in names


def test_the_source_roots_stay_plain_folders() -> None:
    for root in ("cache", "client", "server"):
        assert not (ROOT / root / "__init__.py").exists()


def test_public_names_are_these() -> None:
    assert torchtpu_cache.__all__ == [
        "CacheError",
        "CompileError",
        "CompiledProgram",
        "CompilerCrashed",
        "CompilerMissing",
        "Config",
        "ConfigError",
        "InvalidRequest",
        "LoadError",
        "Mode",
        "Node",
        "Result",
        "Tier",
        "__version__",
        "compile",
    ]
    for name in torchtpu_cache.__all__:
        assert getattr(torchtpu_cache, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torchtpu_cache.nothing  # noqa: B018


def _imported_after(statement: str) -> set[str]:
    source = f"import sys; {statement}; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in answer.stdout.split()}


HEAVY = {
    "jax",
    "jaxlib",
    "numpy",
    "pypjrt",
    "libtpu",
    "fastapi",
    "uvicorn",
    "rich",
    "typer",
    "zstandard",
    "cryptography",
}


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not _imported_after("import torchtpu_cache") & HEAVY


def test_the_command_line_starts_without_what_only_commands_need() -> None:
    heavy = _imported_after("import torchtpu_cache.cli.main as m; m._add_commands_of_other_packages()") & HEAVY
    assert heavy <= {"typer"}


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_deliberate_type_error_is_seen(checker: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from torchtpu_cache_core.names import Key\nnumber: int = Key('x')\n")
    command = [str(Path(sys.executable).with_name(checker)), str(wrong)]
    if checker == "pyright":
        command += ["--pythonpath", sys.executable]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert answer.returncode == 1
    assert "int" in answer.stdout
    assert "Key" in answer.stdout
