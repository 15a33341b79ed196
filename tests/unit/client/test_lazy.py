"""The command line: commands that are loaded when they run, and those of other distributions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from torchtpu_cache.cli import lazy, main
from torchtpu_cache_server.commands import register


@pytest.mark.parametrize(("name", "home", "summary"), main.COMMANDS)
def test_the_summary_of_a_command_is_what_its_help_begins_with(name: str, home: str, summary: str) -> None:
    loaded = lazy.LazyCommand(name, home, summary).load()
    assert loaded.name == name
    assert loaded.get_short_help_str(limit=200) == summary


def test_help_of_all_commands_loads_none_of_them() -> None:
    show = (
        "import sys; from torchtpu_cache.cli import main; sys.argv = ['ttc', '--help']\n"
        "try: main.main()\n"
        "except SystemExit: print(*[n for n in sys.modules if n.startswith(('torchtpu_cache.', 'importlib.metadata'))])"
    )
    answer = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, timeout=60)
    text, _, modules = answer.stdout.rstrip("\n").rpartition("\n")
    assert all(summary in text for _, _, summary in main.COMMANDS)
    assert "Run the service" in text, "a command of another package"
    names = {"", ".cli", ".cli.main", ".cli.lazy", ".cli.output"}
    assert set(modules.split()) <= {f"torchtpu_cache{name}" for name in names}


@pytest.mark.parametrize(
    "arguments",
    ["-v cache ls", "cache -v ls", "cache ls -v", "cache ls --verbose --json", "config show -v", "serve -v --help"],
)
def test_verbose_stands_before_a_command_or_after_it(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["ttc", *arguments.split()])
    told: list[bool] = []
    monkeypatch.setattr(logging.Logger, "setLevel", lambda _, level: told.append(level == logging.INFO))
    with contextlib.suppress(SystemExit):
        main.main()
    assert "No such option" not in capsys.readouterr().err
    assert told == [True] * 3 or "--help" in arguments


def test_verbose_is_in_the_help_of_every_command() -> None:
    for command in ("compile", "cache ls", "dev key", "serve", "status"):
        answer = subprocess.run(
            [sys.executable, "-m", "torchtpu_cache.cli.main", *command.split(), "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert "-v, --verbose" in answer.stdout


def test_a_command_of_this_package_looks_for_no_other() -> None:
    assert main._is_ours(["-v", "cache", "ls"])
    assert not main._is_ours(["--help"])
    assert not main._is_ours(["serve", "compile"])


def test_the_same_commands_are_found_as_by_importlib() -> None:
    homes = {point.value for point in importlib.metadata.entry_points(group=lazy.GROUP)}
    found = {home for folder in sys.path for home in lazy._homes(Path(folder))}
    assert found == homes
    assert list(lazy.registrars()) == [register]


@pytest.mark.parametrize(
    "text",
    [
        "[torchtpu_cache.commands]\nserve = one.two:three\n",
        "[console_scripts]\nx = y:z\n\n [ torchtpu_cache.commands ] \n# other = a:b\n serve=one.two:three [extra] \n",
        "[torchtpu_cache.commands]\r\nserve = one.two:three\r\n[other]\r\nx = y:z\r\n",
    ],
)
def test_entry_points_as_they_may_be_written(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "some-1.0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text(text)
    assert list(lazy._homes(tmp_path)) == ["one.two:three"]
    assert list(lazy._homes(tmp_path / "absent")) == []


def test_a_group_keeps_its_own_commands_beside_the_lazy_ones() -> None:
    app = typer.Typer(cls=lazy.group_of([("late", "nowhere:nothing", "Never loaded.")]), **lazy.SETTINGS)
    register(app)
    app.command("own")(lambda: None)
    assert list(typer.main.get_group(app).commands) == ["late", "serve", "own"]
