"""`torchtpu-cache cache`: look at entries, and keep the disk tier in order."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from torchtpu_cache.cli.options import CacheDir, Json, NamespaceName, Remote, read_config
from torchtpu_cache.cli.output import (
    EXIT_FAILED,
    EXIT_PARTLY,
    EXIT_USAGE,
    counted,
    fail,
    human_bytes,
    human_seconds,
    note,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torchtpu_cache_core.names import Key
    from torchtpu_cache_core.store import EntryInfo, Store
    from torchtpu_cache_core.stores.disk import DiskStore

app = typer.Typer(help="Entries of this machine's disk tier, or of the remote.", no_args_is_help=True)

_MOST_KEYS_TOLD: Final = 5
_ABSENT: Final = "there is no such entry; `torchtpu-cache cache ls` shows the keys, with --at-remote the service's"

AtRemote = Annotated[bool, typer.Option("--at-remote", help="The service's entries instead of this machine's.")]
Keys = Annotated[
    list[str],
    typer.Argument(help="Keys, beginnings of them, or names of this machine's programs, if unique.", metavar="KEY..."),
]


@app.command("ls")
def ls(
    at_remote: AtRemote = False,
    remote: Remote = None,
    cache_dir: CacheDir = None,
    namespace: NamespaceName = None,
    as_json: Json = False,
) -> None:
    """List entries, the last used first.

    The program is JAX's name for it. The service tells no names: with --at-remote they are those of this machine's own
    entries.
    """
    with _store(cache_dir, remote, namespace, at_remote) as store:
        entries = sorted(store.iterate(), key=lambda info: info.accessed_seconds, reverse=True)
    if at_remote:
        names = _names_here(cache_dir, namespace)
        entries = [replace(info, program=names.get(info.key, "")) for info in entries]
    if as_json:
        print_json({"entries": [_info_json(info) for info in entries]})
        return
    if not entries:
        print("no entries")
        return
    rows = [
        [
            info.key.short,
            info.target_name,
            info.program or "-",
            human_seconds(info.compile_seconds),
            human_bytes(info.executable_bytes),
            human_bytes(info.size_bytes),
            _moment(info.accessed_seconds, "%Y-%m-%d %H:%M"),
        ]
        for info in entries
    ]
    columns = ["key", "target", "program", "compile", "executable", "stored", "last used"]
    if not any(info.program for info in entries):
        columns.remove("program")
        rows = [[*row[:2], *row[3:]] for row in rows]
    last = len(columns) - 1
    print_table(columns, rows, right=frozenset({last - 3, last - 2, last - 1, last}))
    total = sum(info.size_bytes for info in entries)
    print(f"\n{counted(len(entries), 'entry', 'entries')}, {human_bytes(total)}")


@app.command("show")
def show(
    key: Annotated[str, typer.Argument(help="A key, a beginning of one, or a program's name, if unique.")],
    at_remote: AtRemote = False,
    remote: Remote = None,
    cache_dir: CacheDir = None,
    namespace: NamespaceName = None,
    as_json: Json = False,
) -> None:
    """Show what an entry says of itself, after checking it."""
    with _store(cache_dir, remote, namespace, at_remote) as store:
        names = functools.partial(_names_here, cache_dir, namespace) if at_remote else dict
        found = find_key(store, key, names)
        stored = fail(f"{key}: {_ABSENT}") if found is None else store.get(found)
    if stored is None:
        fail(f"{key}: the entry went away meanwhile")
    header = stored.entry.header
    answer: dict[str, Any] = {
        "key": header.key,
        "digest": stored.entry.digest,
        "entry_bytes": stored.entry.size_bytes,
        "executable_bytes": header.executable_bytes,
        "executable_format": header.executable_format,
        "codec": header.codec,
        "producer": header.producer,
        "road": header.road,
        "compile_seconds": header.compile_seconds,
        "created_seconds": header.created_seconds,
        "manifest": None,
        "compiled_here": stored.attestation is not None and stored.attestation.machine_mac is not None,
    }
    if stored.attestation is not None and stored.attestation.manifest is not None:
        answer["manifest"] = stored.attestation.manifest.to_json()
    if as_json:
        print_json(answer | {"components": [component.to_json() for component in header.components]})
        return
    fields: dict[str, Any] = {}
    for name, value in answer.items():
        fields |= {f"{name}.{part}": value[part] for part in value} if isinstance(value, dict) else {name: value}
    print_table(["field", "value"], [_field_row(name, value) for name, value in fields.items()])
    print()
    print_table(["component", "value"], [[component.name, component.shown] for component in header.components])


@app.command("rm")
def rm(
    keys: Keys,
    at_remote: AtRemote = False,
    remote: Remote = None,
    cache_dir: CacheDir = None,
    namespace: NamespaceName = None,
    as_json: Json = False,
) -> None:
    """Remove entries. Exit code 3 where some were not there."""
    removed, missing = [], []
    with _store(cache_dir, remote, namespace, at_remote) as store:
        names = functools.cache(functools.partial(_names_here, cache_dir, namespace)) if at_remote else dict
        for text in keys:
            key = find_key(store, text, names)
            if key is not None and store.delete(key):
                removed.append(key)
            else:
                missing.append(text)
    if as_json:
        print_json({"removed": removed, "missing": missing})
    else:
        for key in removed:
            print(f"removed {key}")
        for text in missing:
            note(f"error: {text}: {_ABSENT}")
    if missing:
        raise typer.Exit(EXIT_PARTLY if removed else EXIT_FAILED)


@app.command("verify")
def verify(
    repair: Annotated[bool, typer.Option("--repair", help="Set bad entries aside.")] = False,
    cache_dir: CacheDir = None,
    namespace: NamespaceName = None,
    as_json: Json = False,
) -> None:
    """Check every entry of the disk tier, payload included. Exit code 1 where something bad stays."""
    with _disk(cache_dir, namespace) as store:
        report = store.verify(repair)
        quarantined = store.quarantined()
    bad_stays = any(not bad.set_aside for bad in report.bad) or bool(report.unreadable or report.unlistable)
    if as_json:
        print_json(
            {
                "ok": not bad_stays,
                "entries": report.entries,
                "size_bytes": report.size_bytes,
                "bad": [
                    {"key": bad.key, "reason": bad.reason, "detail": bad.detail, "set_aside": bad.set_aside}
                    for bad in report.bad
                ],
                "unreadable": [{"key": key, "error": error} for key, error in report.unreadable],
                "unlistable": report.unlistable,
                "foreign": report.foreign,
                "leftovers_removed": report.leftovers_removed,
                "quarantined": [{"path": str(item.path), "reason": item.reason} for item in quarantined],
            }
        )
    else:
        print(f"{counted(report.entries, 'good entry', 'good entries')}, {human_bytes(report.size_bytes)}")
        for bad in report.bad:
            print(f"bad        {bad.key}: {bad.reason} {bad.detail}{' (set aside)' if bad.set_aside else ''}")
        for key, error in report.unreadable:
            print(f"unreadable {key}: {error}")
        for name in report.unlistable:
            print(f"unreadable folder {name}")
        for name in report.foreign:
            print(f"not ours   {name} (left alone)")
        for item in quarantined:
            print(f"set aside  {item.path} ({item.reason})")
        if report.leftovers_removed:
            print(f"removed {counted(report.leftovers_removed, 'leftover')} of writers that died")
    if bad_stays:
        if not repair:
            note("run `torchtpu-cache cache verify --repair` to set bad entries aside")
        raise typer.Exit(EXIT_FAILED)


@app.command("gc")
def gc(cache_dir: CacheDir = None, namespace: NamespaceName = None, as_json: Json = False) -> None:
    """Count the disk tier anew, remove leftovers, and bring it within its limits."""
    with _disk(cache_dir, namespace) as store:
        report = store.gc()
    if as_json:
        print_json(
            {
                "entries": report.entries,
                "size_bytes": report.size_bytes,
                "evicted": report.evicted,
                "leftovers_removed": report.leftovers_removed,
                "foreign": list(report.foreign),
            }
        )
        return
    print(
        f"{counted(report.entries, 'entry', 'entries')}, {human_bytes(report.size_bytes)}; evicted {report.evicted:,}"
    )
    print(
        f"removed {counted(report.leftovers_removed, 'leftover')}; left {counted(len(report.foreign), 'foreign file')}"
    )


def find_key(store: Store, text: str, names: Callable[[], Mapping[Key, str]] = dict) -> Key | None:
    """The key that `text` means in `store`, or None; ends the command where it could mean several.

    Args:
        text: a key, the beginning of one, or what is no such thing and so the name of a program.
        names: gives those of programs, for a store that tells none.
    """
    from torchtpu_cache_core.errors import InvalidName
    from torchtpu_cache_core.names import Key, KeyPrefix

    if not text.strip():
        fail("an empty text is no key; `torchtpu-cache cache ls` shows the keys", EXIT_USAGE)
    try:
        prefix = KeyPrefix(text.rstrip("…"))
    except InvalidName:
        known = names()
        named = ((info.key, info.program or known.get(info.key)) for info in store.iterate())
        return _only([key for key, name in named if name == text], f"{text} is the name of")
    with contextlib.suppress(InvalidName):
        whole = Key(prefix)
        return whole if store.contains(whole) else None
    found = [info.key for info in store.iterate() if prefix.matches(info.key)]
    return _only(found, f"{prefix} is the beginning of")


def _only(found: list[Key], what: str) -> Key | None:
    if len(found) > 1:
        some = ", ".join(sorted(key.short for key in found)[:_MOST_KEYS_TOLD])
        more = ", ..." if len(found) > _MOST_KEYS_TOLD else ""
        fail(f"{what} {len(found)} keys; type more of one: {some}{more}", EXIT_USAGE)
    return found[0] if found else None


def _names_here(cache_dir: Path | None, namespace: str | None) -> dict[Key, str]:
    """The programs' names in this machine's disk tier, none where it cannot be read."""
    from torchtpu_cache_core.errors import CacheError

    with contextlib.suppress(CacheError), _disk(cache_dir, namespace) as disk:
        return {info.key: info.program for info in disk.iterate()}
    return {}


@contextlib.contextmanager
def _store(cache_dir: Path | None, remote: str | None, namespace: str | None, at_remote: bool) -> Iterator[Store]:
    if not at_remote:
        if remote is not None:
            fail("--remote says which service, and --at-remote that its entries are meant; add it", EXIT_USAGE)
        with _disk(cache_dir, namespace) as disk:
            yield disk
        return
    config = read_config(cache_dir, remote, namespace)
    if config.remote is None:
        fail("no remote is configured; pass --remote URL or set TORCHTPU_CACHE_REMOTE", EXIT_USAGE)
    from torchtpu_cache.remote import RemoteStore

    with RemoteStore(config.remote, config.namespace) as store:
        yield store


@contextlib.contextmanager
def _disk(cache_dir: Path | None, namespace: str | None) -> Iterator[DiskStore]:
    from torchtpu_cache.assembly import open_disk

    config = read_config(cache_dir, None, namespace)
    with open_disk(config, config.dir) as store:
        yield store


def _info_json(info: EntryInfo) -> dict[str, Any]:
    return {
        "key": info.key,
        "target": info.target_name,
        "program": info.program,
        "size_bytes": info.size_bytes,
        "executable_bytes": info.executable_bytes,
        "compile_seconds": info.compile_seconds,
        "created_seconds": info.created_seconds,
        "accessed_seconds": info.accessed_seconds,
        "pinned": info.pinned,
    }


def _field_row(name: str, value: Any) -> list[str]:
    """A field of an entry as a person reads it; its unit stands with the value."""
    if value in (None, ""):
        shown = "-"
    elif isinstance(value, bool):
        shown = "yes" if value else "no"
    elif name.endswith("created_seconds"):
        shown = _moment(value)
    elif name.endswith("_seconds"):
        shown = human_seconds(value)
    elif name.endswith("_bytes"):
        shown = human_bytes(value)
    else:
        shown = str(value)
    return [name.removesuffix("_seconds").removesuffix("_bytes"), shown]


def _moment(seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).astimezone().strftime(form)
    except (OverflowError, ValueError, OSError):
        return "?"  # a producer's clock can say anything
