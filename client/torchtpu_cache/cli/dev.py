"""`torchtpu-cache dev`: what a key is made of, and where two keys differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchtpu_cache.cli.cache import find_key
from torchtpu_cache.cli.options import CacheDir, Json, NamespaceName, OptionsFile, Remote, TargetName, read_config
from torchtpu_cache.cli.output import EXIT_FAILED, EXIT_USAGE, fail, print_json, print_table

if TYPE_CHECKING:
    from torchtpu_cache.assembly import Assembly
    from torchtpu_cache_core.key import Component
    from torchtpu_cache_core.names import Key

app = typer.Typer(help="Keys and their components.", no_args_is_help=True)


@app.command("key")
def key(
    file: Annotated[Path, typer.Argument(help="A StableHLO module.")],
    target: TargetName = "cpu",
    options: OptionsFile = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every component.")] = False,
    cache_dir: CacheDir = None,
    as_json: Json = False,
) -> None:
    """Print the key of a program, and with --explain what it is made of."""
    from torchtpu_cache.assembly import assemble

    assembly = assemble(read_config(cache_dir, remote=""))
    try:
        found, components = _key_of_file(assembly, file, target, options)
    finally:
        assembly.close()
    if as_json:
        shown = {"components": [component.to_json() for component in components]} if explain else {}
        print_json({"file": str(file), "target": target, "key": found} | shown)
        return
    print(found)
    if explain:
        print()
        print_table(["component", "value"], [[component.name, component.shown] for component in components])


@app.command("diff")
def diff(
    left: Annotated[
        str, typer.Argument(help="A StableHLO module, or an entry by its key or its program's name.", metavar="A")
    ],
    right: Annotated[str, typer.Argument(help="Another one.", metavar="B")],
    target: TargetName = "cpu",
    options: OptionsFile = None,
    remote: Remote = None,
    cache_dir: CacheDir = None,
    namespace: NamespaceName = None,
    as_json: Json = False,
) -> None:
    """Show the components in which two programs or entries differ. Exit code 1 where they do."""
    from torchtpu_cache.assembly import assemble
    from torchtpu_cache_core.key import differences

    assembly = assemble(read_config(cache_dir, remote, namespace))
    try:
        sides = [_side(assembly, text, target, options) for text in (left, right)]
    finally:
        assembly.close()
    (left_key, left_components), (right_key, right_components) = sides
    found = differences(left_components, right_components)
    if as_json:
        rows = [
            {
                "name": difference.name,
                "left": difference.left and difference.left.to_json(),
                "right": difference.right and difference.right.to_json(),
            }
            for difference in found
        ]
        print_json({"left": left_key, "right": right_key, "equal": not found, "differences": rows})
    elif found:
        print_table(
            ["component", left, right],
            [[each.name, *(side.shown if side else "-" for side in (each.left, each.right))] for each in found],
        )
    else:
        print(f"equal: both are {left_key}")
    if found:
        raise typer.Exit(EXIT_FAILED)


def _side(assembly: Assembly, text: str, target: str, options: Path | None) -> tuple[Key, tuple[Component, ...]]:
    """What stands on one side of a diff: a file if there is one of that name, else an entry."""
    if Path(text).is_file():
        return _key_of_file(assembly, Path(text), target, options)
    for store in (assembly.disk, assembly.remote):
        found = None if store is None else find_key(store, text)
        stored = None if store is None or found is None else store.get(found)
        if stored is not None:
            return stored.entry.key, stored.entry.header.components
    return fail(f"{text}: there is no such file, and neither this machine nor the remote has such an entry")


def _key_of_file(
    assembly: Assembly, file: Path, target: str, options: Path | None
) -> tuple[Key, tuple[Component, ...]]:
    from torchtpu_cache.api import make_request
    from torchtpu_cache_core.errors import Bypass
    from torchtpu_cache_core.request import resolve

    try:
        raw_options = None if options is None else options.read_bytes()
        request, _compiler = make_request(assembly, file.read_bytes(), target, raw_options)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", EXIT_USAGE)
    try:
        resolved = resolve(request, assembly.canonicaliser)
    except Bypass as bypass:
        fail(f"{file} has no key, it is compiled without the cache: {bypass}")
    return resolved.key, resolved.components
