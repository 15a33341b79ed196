"""`torchtpu-cache status`: what this machine's cache holds, and whether its remote answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchtpu_cache.cli.options import CacheDir, Json, NamespaceName, Remote, read_config
from torchtpu_cache.cli.output import counted, human_bytes, human_limit, human_seconds, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from torchtpu_cache.remote import RemoteStore
    from torchtpu_cache_core.config import Config


def status(
    remote: Remote = None, cache_dir: CacheDir = None, namespace: NamespaceName = None, as_json: Json = False
) -> None:
    """Show mode, tiers, limits, and what waits for the remote."""
    report = read_status(read_config(cache_dir, remote, namespace))
    if as_json:
        print_json(report)
        return
    disk, spool, answer = report["disk"], report["spool"], report["remote"]
    print(f"mode       {report['mode']}, namespace {report['namespace']}")
    if "error" in disk:
        print(f"disk       {disk['error']}")
    else:
        limits = f"of {human_limit(disk['limit_bytes'])}, {disk['quarantined']} set aside"
        held = f"{counted(disk['entries'], 'entry', 'entries')}, {human_bytes(disk['size_bytes'])}"
        print(f"disk       {held} {limits} ({disk['dir']})")
    if answer is None:
        print("remote     none (set TORCHTPU_CACHE_REMOTE or pass --remote)")
    else:
        health = f"answers in {human_seconds(answer['seconds'])}" if answer["ok"] else answer["error"]
        print(f"remote     {answer['url']}: {health}")
    waiting = f"{counted(spool['entries'], 'executable')}, {human_bytes(spool['size_bytes'])}, for a remote"
    print(f"waiting    {waiting if spool['entries'] else 'nothing'}")


def read_status(config: Config) -> dict[str, Any]:
    """The JSON that `status --json` prints; what cannot be read says so in its place."""
    from torchtpu_cache.assembly import cache_folder, open_disk
    from torchtpu_cache_core.errors import CacheError

    folder = cache_folder(config)
    disk: dict[str, Any] = {"dir": str(config.dir), "error": "the folder cannot be used; everything stays in memory"}
    if folder is not None:
        try:
            with open_disk(config, folder) as store:
                stats = store.stats()
                disk = {
                    "dir": str(folder),
                    "entries": stats.entries,
                    "size_bytes": stats.size_bytes,
                    "limit_bytes": stats.limit_bytes,
                    "limit_entries": stats.limit_entries,
                    "quarantined": len(store.quarantined()),
                }
        except CacheError as error:
            disk["error"] = str(error)
    answer: dict[str, Any] | None = None
    if config.remote is not None:
        from torchtpu_cache.remote import RemoteStore

        with RemoteStore(config.remote, config.namespace) as remote:
            answer = {"url": config.remote, **ping(remote)}
    waiting = {"entries": 0, "size_bytes": 0} if folder is None else waiting_for_any_remote(folder)
    return {"mode": config.mode, "namespace": config.namespace, "disk": disk, "remote": answer, "spool": waiting}


def waiting_for_any_remote(folder: Path) -> dict[str, int]:
    """How much waits in all spools of a cache folder, whatever remote and namespace each is for."""
    from torchtpu_cache.spool import spool_stats

    waiting = [spool_stats(spool) for spool in (folder / "spool").glob("*")]
    return {"entries": sum(each.entries for each in waiting), "size_bytes": sum(each.size_bytes for each in waiting)}


def waiting_for_remote(config: Config, folder: Path) -> dict[str, int]:
    """How much waits in the spool for the configured remote."""
    from torchtpu_cache.spool import spool_folder, spool_stats

    assert config.remote is not None
    waiting = spool_stats(spool_folder(folder, config.remote, config.namespace))
    return {"entries": waiting.entries, "size_bytes": waiting.size_bytes}


def ping(store: RemoteStore) -> dict[str, Any]:
    """Whether the service answers, and how fast."""
    from torchtpu_cache_core.errors import StoreError

    try:
        seconds = store.ping()
    except StoreError as error:
        return {"ok": False, "error": str(error), "kind": error.kind, "seconds": None}
    return {"ok": True, "error": None, "kind": None, "seconds": round(seconds, 6)}
