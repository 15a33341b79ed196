"""Where a user's files live, also for a user without HOME or passwd entry.

A folder is, in this order: `$XDG_*_HOME/torchtpu-cache`; the usual place under HOME; under the passwd entry's home;
`<temp folder>/torchtpu-cache-<uid>-<what>`. HOME and the passwd entry count only where this user may write there, so
that a container with an arbitrary uid, HOME=/ or a read-only root ends in the temp folder. An XDG variable counts as it
is: somebody set it. Nothing is created here but by `ensure_private_dir`.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from torchtpu_cache_core.errors import FailureKind, StoreRefused
from torchtpu_cache_core.stores.failures import store_error

_APPLICATION: Final = "torchtpu-cache"
_SYSTEM_CONFIG: Final = Path("/etc") / _APPLICATION / "config.toml"
_TEMP_DIRS: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - a private folder per uid is made below them


def cache_dir(environ: Mapping[str, str]) -> Path:
    """The default folder of the disk tier: what may be lost at any time."""
    return _user_dir(environ, "XDG_CACHE_HOME", Path(".cache"), "cache")


def data_dir(environ: Mapping[str, str]) -> Path:
    """The default folder of the service: what should be kept."""
    return _user_dir(environ, "XDG_DATA_HOME", Path(".local/share"), "data")


def config_files(environ: Mapping[str, str]) -> list[Path]:
    """The configuration files, the one that wins first; they need not exist. No user file without a home."""
    configured = _absolute(environ.get("XDG_CONFIG_HOME"))
    if configured is None:
        configured = next((home / ".config" for home in _homes(environ)), None)
    user = [] if configured is None else [configured / _APPLICATION / "config.toml"]
    return [*user, _SYSTEM_CONFIG]


def ensure_private_dir(path: Path) -> Path:
    """Makes `path` a folder that only this user can write to, with mode 0700 where it is new; gives it back.

    Whoever can write executables here can run code in every reader, so a folder that others own or may write to is
    refused. Only `path` itself is judged: its parents are the business of whoever named it.

    Raises:
        StoreRefused: it is a symbolic link or no folder, belongs to another user, others may write to it, or it
            cannot be made.
        StoreError: any other failure to make it.
    """
    try:
        for missing in reversed([p for p in (path, *path.parents) if not os.path.lexists(p)]):
            missing.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise store_error(error, f"the folder {path} could not be made") from error
    _refuse_unless_private(path, found, {os.geteuid()})
    return path


def check_private_dir(path: Path) -> None:
    """Refuses to read from a folder that others may write to; a folder that is not there is fine.

    One that belongs to root is fine too: an image may bring a cache along for users who cannot change it.

    Raises:
        StoreRefused: as `ensure_private_dir`, or it may not be looked at.
        StoreError: any other failure to look at it.
    """
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise store_error(error, f"the folder {path} could not be looked at") from error
    _refuse_unless_private(path, found, {os.geteuid(), 0})


def _refuse_unless_private(path: Path, found: os.stat_result, owners: set[int]) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise StoreRefused(
            f"{path} is a symbolic link; choose the folder that it points to instead", FailureKind.FORBIDDEN
        )
    if not stat.S_ISDIR(found.st_mode):
        raise StoreRefused(f"{path} is not a folder; move it away or choose another folder")
    if found.st_uid not in owners:
        raise StoreRefused(
            f"{path} belongs to user {found.st_uid}, not to you (user {os.geteuid()}); choose a folder of your own",
            FailureKind.FORBIDDEN,
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreRefused(
            f"other users may write to {path}, and so run code in your jobs; run: chmod go-w {path}",
            FailureKind.FORBIDDEN,
        )


def _user_dir(environ: Mapping[str, str], variable: str, below_home: Path, fallback: str) -> Path:
    configured = _absolute(environ.get(variable))
    if configured is not None:
        return configured / _APPLICATION
    for home in _homes(environ):
        path = home / below_home / _APPLICATION
        if _may_write(path):
            return path
    # One level: whoever made a folder in between could swap what is in it.
    return _temp_dir(environ) / f"{_APPLICATION}-{os.geteuid()}-{fallback}"


def _homes(environ: Mapping[str, str]) -> Iterator[Path]:
    home = _absolute(environ.get("HOME"))
    if home is not None:
        yield home
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:  # an arbitrary uid in a container
        return
    home = _absolute(entry.pw_dir)
    if home is not None:
        yield home


def _temp_dir(environ: Mapping[str, str]) -> Path:
    named = _absolute(environ.get("TMPDIR"))
    candidates = [*([named] if named is not None else []), *_TEMP_DIRS]
    # Where none can be written to, the first is named, and making the folder gives the error to show.
    return next((path for path in candidates if path.is_dir() and _may_write(path)), candidates[0])


def _may_write(path: Path) -> bool:
    """Whether this user could make and fill `path`, judged by its nearest parent that exists."""
    for existing in (path, *path.parents):
        try:
            existing.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:  # a parent that we may not even look into
            return False
        return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK, effective_ids=True)
    return False


def _absolute(value: str | None) -> Path | None:
    """The path, unless it is empty or relative: the XDG rules say to ignore those."""
    path = Path(value) if value and "\0" not in value else None
    return path if path is not None and path.is_absolute() else None
