"""`torchtpu-cache config`: what is set, and where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from torchtpu_cache.cli.options import Json
from torchtpu_cache.cli.output import print_json, print_table

app = typer.Typer(help="Settings and their origins.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Settings and their origins."""
    # Without a callback, Typer would make the only command of a group the group itself.


@app.command("show")
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
    as_json: Json = False,
) -> None:
    """Show every setting as it stands, secrets masked."""
    from torchtpu_cache_core import config

    loaded = config.load()
    values = config.shown(loaded.config)
    if as_json:
        origins = {name: str(where) for name, where in loaded.origins.items()}
        print_json({"settings": values} | ({"origins": origins} if origin else {}))
        return
    rows = []
    for setting in config.SETTINGS:
        value = values[setting.name]
        text = "-" if value in (None, []) else str(value)
        beside = [str(loaded.origins[setting.name])] if origin else [setting.help]
        rows.append([setting.name, text, *beside])
    print_table(["setting", "value", "origin" if origin else "meaning"], rows)
