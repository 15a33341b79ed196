"""Where files live, for users with and without a home."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from torchtpu_cache_core import paths
from torchtpu_cache_core.errors import StoreRefused
from torchtpu_cache_core.paths import cache_dir, check_private_dir, config_files, data_dir, ensure_private_dir


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A uid without a passwd entry."""

    def missing(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", missing)


def test_xdg_variables_win(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CACHE_HOME": "/c", "XDG_DATA_HOME": "/d", "XDG_CONFIG_HOME": "/e"}
    assert cache_dir(environ) == Path("/c/torchtpu-cache")
    assert data_dir(environ) == Path("/d/torchtpu-cache")
    assert config_files(environ)[0] == Path("/e/torchtpu-cache/config.toml")


def test_home_comes_next(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert cache_dir(environ) == tmp_path / ".cache/torchtpu-cache"
    assert data_dir(environ) == tmp_path / ".local/share/torchtpu-cache"
    assert config_files(environ) == [
        tmp_path / ".config/torchtpu-cache/config.toml",
        Path("/etc/torchtpu-cache/config.toml"),
    ]


@pytest.mark.parametrize("value", ["", "relative/path", "./x", "a\0b"])
@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "HOME"])
def test_what_is_no_absolute_path_is_ignored(tmp_path: Path, nobody: None, variable: str, value: str) -> None:
    environ = {"TMPDIR": str(tmp_path), variable: value}
    assert cache_dir(environ) == tmp_path / f"torchtpu-cache-{os.geteuid()}-cache"


def test_the_passwd_entry_stands_in_for_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd(("me", "x", os.geteuid(), 0, "", str(tmp_path), ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entry)
    assert cache_dir({}) == tmp_path / ".cache/torchtpu-cache"


def test_without_home_a_private_folder_in_the_temp_folder(tmp_path: Path, nobody: None) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    for path in (cache_dir(environ), data_dir(environ)):
        assert path.name.startswith(f"torchtpu-cache-{os.geteuid()}-")
    assert config_files(environ) == [Path("/etc/torchtpu-cache/config.toml")]


def test_a_home_that_cannot_be_written_to_does_not_count(
    tmp_path: Path, nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *rest, **more: path != home and access(path, *rest, **more))
    assert cache_dir({"HOME": str(home), "TMPDIR": str(tmp_path)}).parent == tmp_path


def test_an_unwritable_temp_folder_is_passed_over(
    tmp_path: Path, nobody: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_TEMP_DIRS", (tmp_path / "absent", tmp_path))
    assert cache_dir({"TMPDIR": "/nowhere"}).parent == tmp_path


_AS_STRANGER = """
import json, os, sys
from pathlib import Path
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.paths import cache_dir, data_dir, ensure_private_dir
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.writing import Writer
from torchtpu_cache_core.testing.entries import entry_for
# After all imports, what the store imports late among them: the interpreter may be installed out of a stranger's reach.
os.setgid(54321); os.setuid(54321)
for name in ("HOME", "USER", "LOGNAME"):
    os.environ.pop(name, None)
os.environ.update(json.loads(sys.argv[1]))
root = cache_dir(os.environ)
ensure_private_dir(data_dir(os.environ))
store = DiskStore(root, DEFAULT_NAMESPACE, limit_bytes=1 << 30, limit_entries=10, min_free_bytes=0)
store.put(entry_for("stranger"))
assert store.get(entry_for("stranger").key) is not None
print(json.dumps([str(root), oct(root.stat().st_mode & 0o777), oct(root.parent.stat().st_mode & 0o777)]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="capability: only root can become a uid without a passwd entry")
@pytest.mark.parametrize("environ", [{}, {"HOME": "/"}, {"HOME": "/root"}, {"HOME": "/nonexistent"}])
def test_a_uid_without_passwd_entry_has_a_working_cache(tmp_path: Path, environ: dict[str, str]) -> None:
    temp = Path("/tmp") / f"torchtpu-cache-test-{os.getpid()}"  # pytest's own folders are closed to strangers
    temp.mkdir(mode=0o700)
    os.chown(temp, 54321, 54321)
    try:
        command = [sys.executable, "-c", _AS_STRANGER, json.dumps({**environ, "TMPDIR": str(temp)})]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
        assert done.returncode == 0, done.stderr
        root, mode, parent_mode = json.loads(done.stdout)
        assert root == f"{temp}/torchtpu-cache-54321-cache"
        assert (mode, parent_mode) == ("0o700", "0o700")
    finally:
        subprocess.run(["rm", "-rf", str(temp)], check=True)


# ---- private folders -------------------------------------------------------------------------------------------


def test_a_new_folder_is_private_with_all_that_it_needed(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = ensure_private_dir(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(old)
    for path in (made, made.parent, made.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert ensure_private_dir(made) == made


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    for judge in (ensure_private_dir, check_private_dir):
        with pytest.raises(StoreRefused, match=r"others?.* may write .*chmod go-w"):
            judge(path)


def test_a_symlink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    for judge in (ensure_private_dir, check_private_dir):
        with pytest.raises(StoreRefused, match="symbolic link"):
            judge(tmp_path / "link")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for judge in (ensure_private_dir, check_private_dir):
        with pytest.raises(StoreRefused, match="not a folder"):
            judge(tmp_path / "file")
    with pytest.raises(StoreRefused):
        ensure_private_dir(tmp_path / "file" / "below")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(StoreRefused, match=f"belongs to user {owner}, not to you"):
        ensure_private_dir(tmp_path / "theirs")
    if owner == 0:
        check_private_dir(tmp_path / "theirs")  # root may bring a cache along
    check_private_dir(tmp_path / "absent")
