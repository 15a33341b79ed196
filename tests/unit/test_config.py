"""Settings: the order of layers, origins, and one sentence for everything that has no sense."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtpu_cache_core import config
from torchtpu_cache_core.config import Mode, parse_size
from torchtpu_cache_core.errors import ConfigError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}


def write_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config" / "torchtpu-cache" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_a_flag_beats_a_variable_beats_a_file_beats_the_default(tmp_path: Path, environ: dict[str, str]) -> None:
    path = write_file(tmp_path, 'mode = "read"\nnamespace = "file"\nmax_disk_bytes = "5GB"\n')
    environ |= {"TORCHTPU_CACHE": "record", "TORCHTPU_CACHE_NAMESPACE": "variable"}
    loaded = config.load({"mode": "off", "namespace": None}, environ)
    assert loaded.config.mode is Mode.OFF
    assert loaded.config.namespace == "variable"
    assert loaded.config.max_disk_bytes == 5_000_000_000
    assert loaded.config.listen == config.DEFAULT_LISTEN
    origins = {name: str(origin) for name, origin in loaded.origins.items()}
    assert origins["mode"] == "flag"
    assert origins["namespace"] == "variable TORCHTPU_CACHE_NAMESPACE"
    assert origins["max_disk_bytes"] == f"file {path}"
    assert origins["listen"] == "default"


@pytest.mark.parametrize(
    ("variables", "text", "says"),
    [
        ({"TORCHTPU_CACHE_REMOT": "x"}, "", "did you mean TORCHTPU_CACHE_REMOTE"),
        ({}, "max_disk_byte = 1\n", "did you mean max_disk_bytes"),
        ({}, "mode = \n", "cannot be read"),
        ({"TORCHTPU_CACHE": "fast"}, "", "one of on, off, read, record"),
        ({"TORCHTPU_CACHE_REMOTE": "ftp://host"}, "", "must begin with http"),
        ({"TORCHTPU_CACHE_REMOTE": "http://host:99999"}, "", "cannot be read"),
        ({"TORCHTPU_CACHE_REMOTE": "http://10.0.0.1:8077"}, "", "beyond loopback"),
        ({"TORCHTPU_CACHE_NAMESPACE": "../x"}, "", "is not a namespace"),
        ({"TORCHTPU_CACHE_MAX_DISK_BYTES": "lots"}, "", "is not a size"),
        ({"TORCHTPU_CACHE_DRAIN_SECONDS": "-1"}, "", "number of seconds"),
        ({"TORCHTPU_CACHE_DRAIN_SECONDS": "nan"}, "", "number of seconds"),
        ({"TORCHTPU_CACHE_MAX_DISK_ENTRIES": "1.5"}, "", "whole number"),
        ({"TORCHTPU_CACHE_LISTEN": "8077"}, "", "HOST:PORT"),
        ({}, "custom_call_targets = 3\n", "list of custom-call targets"),
        ({}, "drain_seconds = true\n", "number of seconds"),
        ({"TORCHTPU_CACHE_JAX": "maybe"}, "", "neither true"),
        ({}, "jax = 2\n", "neither true"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    tmp_path: Path, environ: dict[str, str], variables: dict[str, str], text: str, says: str
) -> None:
    write_file(tmp_path, text)
    with pytest.raises(ConfigError, match=says) as caught:
        config.load({}, environ | variables)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "no regular file"),
        (Path.mkdir, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (lambda path: path.symlink_to(path.name), "symbolic links"),
        (lambda path: path.write_bytes(b"x = '" + bytes(1 << 20)), "over 1,048,576"),
        (lambda path: path.write_bytes(b"\xff"), "utf-8"),
        (lambda path: path.write_text("x = " + "[" * 100_000), "nested"),
        (lambda path: path.write_text("max_disk_entries = " + "9" * 5000), "digits"),
    ],
    ids=["pipe", "folder", "device", "loop", "long", "binary", "nested", "digits"],
)
def test_a_file_that_is_none_is_refused_at_once(
    tmp_path: Path, environ: dict[str, str], make: Callable[[Path], object], says: str
) -> None:
    path = write_file(tmp_path, "")
    path.unlink()
    make(path)
    with pytest.raises(ConfigError, match=says) as caught:
        config.load({}, environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("20GB", 20 * 10**9),
        ("20GiB", 20 << 30),
        ("1.5 MB", 1_500_000),
        ("7k", 7000),
        (" 1.5 kib ", 1536),
        ("2TiB", 2 << 40),
        ("7b", 7),
        (5, 5),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


def test_every_setting_can_be_shown(environ: dict[str, str]) -> None:
    loaded = config.load({"remote": "https://localhost:1/"}, environ)
    shown = config.shown(loaded.config)
    assert set(shown) == {setting.name for setting in config.SETTINGS}
    assert shown["remote"] == "https://localhost:1"


def test_no_setting_holds_a_password(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="user name or password") as caught:
        config.load({"remote": "https://user:secret@localhost:1/"}, environ)
    assert "secret" not in str(caught.value)


TAKES = {
    config._mode: "a mode",
    config._remote: "a URL",
    config._namespace: "a name",
    config._path: "a folder",
    config._listen: "HOST:PORT",
    config.parse_size: "a size",
    config._count: "a count",
    config._seconds: "seconds",
    config._targets: "a list",
    config._switch: "a switch",
}


def test_the_document_names_every_setting() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    documented = [(row[0].strip("`"), row[1].strip("`"), row[4]) for row in rows]
    assert documented == [(setting.name, setting.variable, setting.help) for setting in config.SETTINGS]
    assert [row[3] for row in rows] == [TAKES[setting.read] for setting in config.SETTINGS]
    assert all(f"\n| {what} | " in text for what in TAKES.values()), "a kind of value is not described"
    flags = {row[0].strip("`"): row[5].strip("`") for row in rows if row[5] != "none"}
    assert flags == {
        "remote": "--remote",
        "namespace": "--namespace",
        "dir": "--cache-dir",
        "data_dir": "--data-dir",
        "listen": "--listen",
        "max_service_bytes": "--max-size",
        "verbose": "-v",
    }
    assert set(flags.values()) <= _flags_of_the_command_line()


def _flags_of_the_command_line() -> set[str]:
    import typer.main

    from torchtpu_cache.cli.lazy import LazyCommand
    from torchtpu_cache.cli.main import app
    from torchtpu_cache_server.commands import register

    served = typer.Typer()
    register(served)
    flags: set[str] = set()
    commands = [typer.main.get_command(app), typer.main.get_command(served)]
    while commands:
        command = commands.pop()
        if isinstance(command, LazyCommand):
            command = command.load()
        flags.update(option for parameter in command.params for option in parameter.opts)
        commands.extend(getattr(command, "commands", {}).values())
    return flags


@pytest.mark.parametrize(
    "text", ["", "GB", "-5", "inf", "nan", "1e999GB", "9" * 400, "5 5", "5PB", "0x10", "٣", -1, True, 1.5]
)
def test_senseless_sizes(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)  # type: ignore[arg-type]


def test_a_job_goes_on_without_the_settings_that_have_no_sense(tmp_path: Path, environ: dict[str, str]) -> None:
    write_file(tmp_path, 'namespace = "file"\nfuture = 1\n')
    told: list[str] = []
    variables = {"TORCHTPU_CACHE_NAMESPACE": "Not/One", "TORCHTPU_CACHE_FUTURE": "1", "TORCHTPU_CACHE": "read"}
    loaded = config.load({}, environ | variables, complain=lambda error: told.append(str(error)))
    assert loaded.config.namespace == "file"
    assert loaded.config.mode is Mode.READ
    assert len(told) == 3
    assert str(loaded.origins["namespace"]).startswith("file ")


@pytest.mark.parametrize(
    ("variables", "text", "wanted"),
    [
        ({}, "", False),
        ({"TORCHTPU_CACHE_JAX": "1"}, "", True),
        ({"TORCHTPU_CACHE_JAX": "On"}, "", True),
        ({"TORCHTPU_CACHE_JAX": "0"}, "jax = true\n", False),
        ({}, "jax = true\n", True),
        ({}, 'jax = "no"\n', False),
    ],
)
def test_a_switch_is_true_or_false(
    tmp_path: Path, environ: dict[str, str], variables: dict[str, str], text: str, wanted: bool
) -> None:
    write_file(tmp_path, text)
    assert config.load({}, environ | variables).config.jax is wanted
