"""`torchtpu-cache config`: what is set, and where it comes from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from torchtpu_cache.cli.options import Json
from torchtpu_cache.cli.output import human_limit, print_json, print_table

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
        beside = str(loaded.origins[setting.name]) if origin else setting.help
        rows.append([setting.name, _as_written(setting.name, values[setting.name]), beside])
    print_table(["setting", "value", "origin" if origin else "meaning"], rows)


def _as_written(name: str, value: Any) -> str:
    """A value as people write it into a variable or a file."""
    if value in (None, []):
        return "-"
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes"):
        return human_limit(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
