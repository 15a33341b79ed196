"""Commands that the service adds to the command line. What is heavy is imported when a command runs."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from torchtpu_cache_core.errors import CacheError, ConfigError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_size(text: str) -> int:
    """Bytes in `50GB`, `512 MiB` or `1000000`.

    Raises:
        ConfigError: it is no size above zero.
    """
    digits = text.strip().lower().rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = text.strip().lower()[len(digits) :].strip()
    try:
        size_bytes = int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size_bytes = 0
    if size_bytes <= 0:
        raise ConfigError(f"{text[:40]!r} is no size; write 50GB, 512MiB or a number of bytes")
    return size_bytes


def register(app: typer.Typer) -> None:
    """Adds `serve`."""

    @app.command()
    def serve(
        listen: Annotated[
            str, typer.Option(envvar="TORCHTPU_CACHE_LISTEN", help="HOST:PORT; port 0 takes a free one.")
        ] = "127.0.0.1:8077",
        data_dir: Annotated[
            Path | None,
            typer.Option(envvar="TORCHTPU_CACHE_DATA_DIR", help="Where entries are kept.", show_default="per user"),
        ] = None,
        max_size: Annotated[str, typer.Option(help="Limit of all entries, such as 50GB.")] = "20GiB",
        json_: Annotated[bool, typer.Option("--json", help="Say where it listens as one JSON line.")] = False,
    ) -> None:
        """Run the service on this machine, with its index in SQLite and its entries in files.

        It ends at SIGTERM or Ctrl-C, after the requests that run. What keeps it from starting is one CacheError.
        """
        from torchtpu_cache_core import paths

        try:
            from torchtpu_cache_server import serving
            from torchtpu_cache_server.admission import Limits
        except ImportError as error:
            raise CacheError(
                f"the service needs {error.name}, which is not here: pip install 'torchtpu-cache[server]'"
            ) from error
        # The application logs its own errors, with the request's id.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        folder = data_dir if data_dir is not None else paths.data_dir(os.environ)

        def ready(url: str) -> None:
            if json_:
                print(json.dumps({"schema": 1, "url": url, "data_dir": str(folder), "pid": os.getpid()}), flush=True)
            else:
                print(f"listening on {url} (data in {folder})", flush=True)

        serving.serve(
            listen=serving.Listen.parse(listen),
            data_dir=folder,
            limits=Limits(limit_bytes=parse_size(max_size)),
            ready=ready,
        )
