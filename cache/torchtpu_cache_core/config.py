"""Settings: flag > `TORCHTPU_CACHE_*` > user TOML > system TOML > default, the same names everywhere.

Every setting is one `Setting` in `SETTINGS`: its name (the TOML key), its variable, its default and its reader. An
unknown key in a file, or an unknown `TORCHTPU_CACHE_*` variable, is refused with one sentence.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core import paths
from torchtpu_cache_core.endpoint import Endpoint
from torchtpu_cache_core.errors import ConfigError, InvalidName
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Namespace
from torchtpu_cache_core.regular import open_regular

VARIABLE_PREFIX: Final = "TORCHTPU_CACHE"
DEFAULT_LISTEN: Final = "127.0.0.1:8077"

_MAX_FILE_BYTES: Final = 1 << 20
_SIZE: Final = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


class Mode(enum.StrEnum):
    """What a node does with its cache (`TORCHTPU_CACHE`)."""

    ON = "on"
    OFF = "off"
    READ = "read"
    """Serves hits, and stores nothing that it compiled."""
    RECORD = "record"
    """Compiles everything and publishes it, and serves nothing."""

    @property
    def serves(self) -> bool:
        return self in (Mode.ON, Mode.READ)

    @property
    def publishes(self) -> bool:
        return self in (Mode.ON, Mode.RECORD)


def parse_size(text: str | int) -> int:
    """Bytes from `1048576`, `20GB` (powers of ten) or `20GiB` (powers of two).

    Raises:
        ConfigError: anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{text!r} is not a size such as 50GB, 20GiB or a number of bytes")
    unit = (match[2] or "").upper()
    return int(float(match[1]) * _UNITS[unit[:-1] if len(unit) > 1 and unit.endswith("B") else unit])


def _seconds(value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]  # anything else raises here
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0 <= seconds < 1e9:
        raise ConfigError(f"{value!r} is not a number of seconds")
    return seconds


def _count(value: object) -> int:
    if isinstance(value, int | str) and not isinstance(value, bool) and str(value).isdecimal():
        return int(value)
    raise ConfigError(f"{value!r} is not a whole number")


def _switch(value: object) -> bool:
    word = str(value).strip().lower()
    if word in ("1", "true", "on", "yes"):
        return True
    if word in ("0", "false", "off", "no", ""):
        return False
    raise ConfigError(f"{value!r} is neither true (1, on, yes) nor false (0, off, no)")


def _mode(value: object) -> Mode:
    try:
        return Mode(str(value))
    except ValueError:
        raise ConfigError(f"{value!r} is not a mode; it is one of {', '.join(Mode)}") from None


def _namespace(value: object) -> Namespace:
    try:
        return Namespace(str(value))
    except InvalidName as error:
        raise ConfigError(str(error)) from None


def _remote(value: object) -> str | None:
    url = str(value).rstrip("/")
    if not url:
        return None
    Endpoint.parse(url)
    return url


def _path(value: object) -> Path:
    text = str(value)
    if not text or "\0" in text:
        raise ConfigError(f"{text!r} is not a folder")
    return Path(text).absolute()


def _listen(value: object) -> str:
    """`HOST:PORT`, `:PORT` or `HOST`, in form only: where a service may listen is the service's to say."""
    text = str(value)
    _, colon, port = text.rpartition(":")
    if colon and not text.endswith("]"):
        valid = port.isdecimal() and int(port) < 1 << 16
    else:
        valid = bool(text) and not text.isdecimal()
    if not valid:
        raise ConfigError(f"{value!r} is not HOST:PORT, such as {DEFAULT_LISTEN}")
    return text


def _targets(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{value!r} is not a list of custom-call targets")
    return tuple(sorted({name.strip() for name in names if name.strip()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings, validated; what each means stands in `SETTINGS`."""

    mode: Mode
    remote: str | None
    namespace: Namespace
    dir: Path
    data_dir: Path
    listen: str
    max_service_bytes: int
    max_disk_bytes: int
    max_disk_entries: int
    min_free_bytes: int
    max_memory_bytes: int
    max_spool_bytes: int
    drain_seconds: float
    compile_timeout_seconds: float
    custom_call_targets: tuple[str, ...]
    jax: bool
    verbose: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting.

    Args:
        name: the field of Config and the key in a TOML file.
        variable: the environment variable.
        read: makes the value from a string or a TOML value; ConfigError where it cannot.
        default: from the environment, for what depends on the user.
        help: one line for people.
    """

    name: str
    variable: str
    read: Callable[[Any], Any]
    default: Callable[[Mapping[str, str]], Any]
    help: str


def _setting(name: str, read: Callable[[Any], Any], default: Any, help_line: str, variable: str = "") -> Setting:
    return Setting(
        name=name,
        variable=variable or f"{VARIABLE_PREFIX}_{name.upper()}",
        read=read,
        default=default if callable(default) else lambda _environ: read(default),
        help=help_line,
    )


SETTINGS: Final = (
    _setting("mode", _mode, "on", "on, off, read (never publishes) or record (never serves)", VARIABLE_PREFIX),
    _setting("remote", _remote, "", "URL of the service; empty for none"),
    _setting("namespace", _namespace, DEFAULT_NAMESPACE, "the tenant at the service"),
    _setting("dir", _path, paths.cache_dir, "this machine's cache folder"),
    _setting("data_dir", _path, paths.data_dir, "the service's folder"),
    _setting("listen", _listen, DEFAULT_LISTEN, "where the service listens"),
    _setting("max_service_bytes", parse_size, "20GiB", "limit of all entries of the service"),
    _setting("max_disk_bytes", parse_size, "20GiB", "limit of the disk tier, such as 20GiB"),
    _setting("max_disk_entries", _count, 200_000, "limit of the disk tier in entries"),
    _setting("min_free_bytes", parse_size, "1GiB", "space that the disk tier leaves free on its filesystem"),
    _setting("max_memory_bytes", parse_size, "1GiB", "limit of the memory tier"),
    _setting("max_spool_bytes", parse_size, "4GiB", "what may wait for the remote"),
    _setting("drain_seconds", _seconds, 30.0, "how long a command or a job waits for its uploads at its end"),
    _setting("compile_timeout_seconds", _seconds, 7200.0, "when a compile counts as hung"),
    _setting("custom_call_targets", _targets, (), "custom-call targets that may be cached besides the built-in list"),
    _setting("jax", _switch, "false", "jobs with JAX use this cache, without a change to their code"),
    _setting("verbose", _switch, "false", "jobs and commands say what the cache does, on standard error"),
)

_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `flag`, `variable`, `file` or `default`, and which."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".strip()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and the origin of each of its values."""

    config: Config
    origins: dict[str, Origin]


Complain = Callable[[ConfigError], None]


def _refuse(error: ConfigError) -> None:
    raise error


def load(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, complain: Complain = _refuse
) -> Loaded:
    """Reads all layers.

    Args:
        flags: values given on the command line or in code, by setting name; None means not given.
        complain: told of each unknown name and each value without sense; where it returns, the next layer counts.

    Raises:
        ConfigError: by default, at the first complaint, in one sentence that says where.
    """
    environ = os.environ if environ is None else environ
    layers: list[tuple[Mapping[str, Any], Callable[[str], Origin]]] = [
        ({name: value for name, value in (flags or {}).items() if value is not None}, lambda _name: Origin("flag")),
        (_variables(environ, complain), lambda name: Origin("variable", _BY_NAME[name].variable)),
    ]
    for path in paths.config_files(environ):
        layers.append((_file(path, complain), lambda _name, path=path: Origin("file", str(path))))  # type: ignore[misc]
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for setting in SETTINGS:
        for layer, origin in layers:
            if setting.name not in layer:
                continue
            where = origin(setting.name)
            try:
                values[setting.name] = setting.read(layer[setting.name])
            except ConfigError as error:
                complain(ConfigError(f"{setting.name} ({where}): {error}"))
                continue
            origins[setting.name] = where
            break
        else:
            values[setting.name] = setting.default(environ)
            origins[setting.name] = Origin("default")
    return Loaded(Config(**values), origins)


def _variables(environ: Mapping[str, str], complain: Complain) -> dict[str, str]:
    by_variable = {setting.variable: setting.name for setting in SETTINGS}
    unknown = [
        name
        for name in environ
        if (name == VARIABLE_PREFIX or name.startswith(f"{VARIABLE_PREFIX}_")) and name not in by_variable
    ]
    for name in unknown:
        complain(ConfigError(f"{name} is not a setting of torchtpu-cache{_did_you_mean(name, by_variable)}"))
    return {by_variable[name]: value for name, value in environ.items() if name in by_variable}


def _file(path: Path, complain: Complain) -> dict[str, Any]:
    try:
        values = _toml(path)
    except ConfigError as error:
        complain(error)
        return {}
    for name in values.keys() - _BY_NAME.keys():
        complain(ConfigError(f"{path}: {name!r} is not a setting{_did_you_mean(name, _BY_NAME)}"))
    return values


def _toml(path: Path) -> dict[str, Any]:
    """What the file holds, nothing if there is none; ConfigError where it cannot be read."""
    if not os.path.lexists(path):
        return {}
    import tomllib  # late, as most users have no file

    try:
        with open_regular(path, follows_links=True) as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ValueError(f"it is over {_MAX_FILE_BYTES:,} bytes")
        return tomllib.loads(raw.decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except RecursionError:
        raise ConfigError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # also a number of more digits than Python reads
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from None


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    import difflib

    if name == f"{VARIABLE_PREFIX}_MODE":
        return f"; the mode is {VARIABLE_PREFIX} itself"
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else "; see `torchtpu-cache config show`"


def shown(config: Config) -> dict[str, Any]:
    """Every value as plain JSON; none is a secret, for a URL with a password is refused."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = (
            str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        )
    return values
