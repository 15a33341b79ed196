"""Commands that the service adds to the command line. What is heavy is imported when a command runs."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Annotated, Final

import typer

from torchtpu_cache_core.errors import CacheError
from torchtpu_cache_core.verbosity import say_more

_log = logging.getLogger(__name__)

_SMALL_BYTES: Final = 16 << 20


def register(app: typer.Typer) -> None:
    """Adds `serve`."""

    @app.command()
    def serve(
        listen: Annotated[
            str | None, typer.Option(help="HOST:PORT; port 0 takes a free one. [default: 127.0.0.1:8077]")
        ] = None,
        data_dir: Annotated[
            Path | None, typer.Option(help="Where entries are kept. [default: ~/.local/share/torchtpu-cache]")
        ] = None,
        max_size: Annotated[
            str | None, typer.Option(help="Limit of all entries, such as 50GB. [default: 20GiB]")
        ] = None,
        json_: Annotated[bool, typer.Option("--json", help="Say where it listens as one JSON line.")] = False,
    ) -> None:
        """Run the service on this machine, with its index in SQLite and its entries in files.

        It ends at SIGTERM or Ctrl-C, after the requests that run.
        """
        from torchtpu_cache_core import config

        settings = config.load({"listen": listen, "data_dir": data_dir, "max_service_bytes": max_size}).config
        try:
            from torchtpu_cache_server import serving
            from torchtpu_cache_server.admission import Limits
        except ImportError as error:
            raise CacheError(
                f"the service needs {error.name}, which is not here: pip install 'torchtpu-cache[server]'"
            ) from error
        # The application logs its own errors, with the request's id.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        if settings.verbose:
            say_more()
        folder = settings.data_dir
        if 0 < settings.max_service_bytes < _SMALL_BYTES:
            _log.warning("--max-size is below 16MiB; the executables of many programs will not fit")

        def ready(url: str) -> None:
            if json_:
                print(json.dumps({"schema": 1, "url": url, "data_dir": str(folder), "pid": os.getpid()}), flush=True)
            else:
                print(f"listening on {url} (data in {folder})", flush=True)

        serving.serve(
            listen=serving.Listen.parse(settings.listen),
            data_dir=folder,
            limits=Limits(limit_bytes=settings.max_service_bytes),
            ready=ready,
        )
