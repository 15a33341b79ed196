"""`torchtpu-cache doctor`: is everything that a compile needs in order, and what to do where it is not."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from torchtpu_cache.cli.options import CacheDir, Json, NamespaceName, Remote
from torchtpu_cache.cli.output import (
    EXIT_FAILED,
    counted,
    human_bytes,
    human_limit,
    human_seconds,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from torchtpu_cache_core.config import Config
    from torchtpu_cache_core.store import Store

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"

_JAX_SECONDS: Final = 60
_TINY_MODULE: Final = (
    b"module @doctor { func.func public @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> } }"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it is, and what to do about it."""

    name: str
    status: str
    detail: str


def doctor(
    remote: Remote = None, cache_dir: CacheDir = None, namespace: NamespaceName = None, as_json: Json = False
) -> None:
    """Check folders, canonicaliser, compilers and remote. Exit code 1 where something is wrong."""
    checks = examine({"dir": cache_dir, "remote": remote, "namespace": namespace})
    ok = all(check.status != FAILED for check in checks)
    if as_json:
        found = [{"name": check.name, "status": check.status, "detail": check.detail} for check in checks]
        print_json({"ok": ok, "checks": found})
    else:
        print_table(["check", "", "finding"], [[check.name, check.status, check.detail] for check in checks])
    if not ok:
        raise typer.Exit(EXIT_FAILED)


def examine(flags: dict[str, object]) -> list[Check]:
    """All findings, each check on its own: one that fails does not hide the next."""
    from torchtpu_cache_core import config
    from torchtpu_cache_core.errors import ConfigError

    try:
        settings = config.load(flags).config
    except ConfigError as error:
        return [Check("settings", FAILED, str(error))]
    checks = [Check("settings", OK, f"mode {settings.mode}, namespace {settings.namespace}")]
    folder = _examine_folder(settings, checks)
    checks.append(_guarded("canonicaliser", lambda: _examine_canonicaliser(settings)))
    checks.extend(_examine_compilers())
    checks.append(_examine_jax(settings))
    if settings.remote is None:
        checks.append(Check("remote", OK, "none is configured; programs are shared on this machine only"))
    else:
        checks.append(_guarded("remote", lambda: _examine_remote(settings)))
        if folder is not None:
            checks.append(_guarded("uploads", lambda: _examine_spool(settings, folder)))
    return checks


def _guarded(name: str, examine_one: Callable[[], Check]) -> Check:
    from torchtpu_cache_core.errors import CacheError

    try:
        return examine_one()
    except (CacheError, OSError) as error:
        return Check(name, FAILED, str(error))


def _examine_folder(settings: Config, checks: list[Check]) -> Path | None:
    from torchtpu_cache.assembly import open_disk
    from torchtpu_cache_core import paths
    from torchtpu_cache_core.errors import CacheError

    try:
        folder = paths.ensure_private_dir(settings.dir)
        with open_disk(settings, folder) as disk:
            _canary(disk)
            stats = disk.stats()
            quarantined = len(disk.quarantined())
    except (CacheError, OSError) as error:
        checks.append(Check("cache folder", FAILED, f"{error}; executables stay in memory, so set TORCHTPU_CACHE_DIR"))
        return None
    held = f"{counted(stats.entries, 'entry', 'entries')}, {human_bytes(stats.size_bytes)}"
    checks.append(Check("cache folder", OK, f"{folder}: {held} of {human_limit(stats.limit_bytes)}"))
    free = shutil.disk_usage(folder).free
    if free < settings.min_free_bytes:
        less = f"{human_bytes(free)} free is less than min_free_bytes ({human_limit(settings.min_free_bytes)})"
        checks.append(Check("disk space", WARNING, f"{less}; nothing is stored until there is more"))
    else:
        checks.append(Check("disk space", OK, f"{human_bytes(free)} free"))
    if quarantined:
        hint = "look at them with `torchtpu-cache cache verify`"
        checks.append(
            Check("bad entries", WARNING, f"{counted(quarantined, 'bad entry', 'bad entries')} set aside; {hint}")
        )
    return folder


def _canary(store: Store) -> None:
    """Puts, gets and deletes an entry that nobody else can ask for.

    Raises:
        StoreError: one of the three failed, or what came back is not what was put.
    """
    from torchtpu_cache_core.clock import SYSTEM_CLOCK
    from torchtpu_cache_core.entry import Entry
    from torchtpu_cache_core.errors import FailureKind, StoreRefused
    from torchtpu_cache_core.key import SCHEME, Component

    executable = secrets.token_bytes(4096)
    entry = Entry.build(
        executable,
        components=[Component.of("scheme", SCHEME), Component.of("canary", secrets.token_hex(16))],
        executable_format="canary",
        producer="torchtpu-cache doctor",
        road="canary",
        compile_seconds=0.0,
        created_seconds=SYSTEM_CLOCK.time(),
    )
    store.put(entry)
    stored = store.get(entry.key)
    if stored is None or stored.entry.digest != entry.digest or stored.entry.executable() != executable:
        raise StoreRefused("an entry that was just put did not come back as it was", FailureKind.PROTOCOL)
    if not store.delete(entry.key) or store.contains(entry.key):
        raise StoreRefused("an entry that was deleted is still there", FailureKind.PROTOCOL)


def _examine_canonicaliser(settings: Config) -> Check:
    from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
    from torchtpu_cache_core.canonical.scan import FORM_RAW
    from torchtpu_cache_core.identity import FileIdentities

    canonicaliser = ProgramCanonicaliser(
        None, identities=FileIdentities(None), allowed_custom_calls=settings.custom_call_targets
    )
    try:
        form = canonicaliser.resolve(_TINY_MODULE).form
    finally:
        canonicaliser.close()
    if form == FORM_RAW:
        hint = "pip install 'torchtpu-cache[agent]'"
        return Check(
            "canonicaliser", WARNING, f"absent: a program that moved to another file is compiled again; {hint}"
        )
    return Check("canonicaliser", OK, f"canonical form {form}")


def _examine_compilers() -> list[Check]:
    from torchtpu_cache.compilers.registry import targets_here

    return [
        Check(f"compiler {found.kind}", OK, f"{found.version or 'version unknown'} ({found.library})")
        if found.usable
        else Check(f"compiler {found.kind}", WARNING, found.problem)
        for found in targets_here(os.environ)
    ]


def _examine_jax(settings: Config) -> Check:
    """Whether an installed JAX takes the adapter: tried in a child, in a folder of its own and without the remote."""
    import importlib.util
    import json
    import subprocess
    import sys
    import tempfile

    if importlib.util.find_spec("jax") is None:
        return Check("jax", OK, "not installed, so no job with it runs here; pip install 'torchtpu-cache[jax]'")
    with tempfile.TemporaryDirectory() as folder:
        mine = {"TORCHTPU_CACHE": "on", "TORCHTPU_CACHE_DIR": folder, "TORCHTPU_CACHE_REMOTE": ""}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "torchtpu_cache.jax.check"],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "TORCHTPU_CACHE_JAX": "0", **mine},
                capture_output=True,
                text=True,
                check=False,
                timeout=_JAX_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return Check("jax", WARNING, f"jax did not compile a tiny program within {_JAX_SECONDS} s")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().rsplit("\n", 1)[-1]
        return Check("jax", WARNING, f"jax could not be tried: {last or 'it said nothing'}")
    if answer["problem"]:
        return Check("jax", WARNING, f"{answer['jax']} is not served: {answer['problem']}")
    if not (settings.mode.serves or settings.mode.publishes):
        asks = "the mode is off, so no job uses this cache"
    elif settings.jax:
        asks = "jobs with it use this cache"
    else:
        asks = "jobs use this cache with TORCHTPU_CACHE_JAX=1"
    return Check("jax", OK, f"{answer['jax']} takes the adapter; {asks}")


def _examine_remote(settings: Config) -> Check:
    from torchtpu_cache.cli.status import ping
    from torchtpu_cache.remote import RemoteStore

    assert settings.remote is not None
    url = settings.remote
    with RemoteStore(settings.remote, settings.namespace) as store:
        answer = ping(store)
        if not answer["ok"]:
            return Check("remote", FAILED, f"{url}: {answer['error']}")
        if settings.mode.publishes:
            _canary(store)
            return Check(
                "remote", OK, f"{url}: put, get and delete work; answers in {human_seconds(answer['seconds'])}"
            )
        return Check("remote", OK, f"{url}: answers in {human_seconds(answer['seconds'])}; not written in this mode")


def _examine_spool(settings: Config, folder: Path) -> Check:
    from torchtpu_cache.cli.status import waiting_for_remote

    waiting = waiting_for_remote(settings, folder)
    if waiting["entries"]:
        what = f"{counted(waiting['entries'], 'executable')}, {human_bytes(waiting['size_bytes'])}"
        return Check("uploads", WARNING, f"{what}, for the remote; the next job that has it sends what waits")
    return Check("uploads", OK, "nothing waits for the remote")
