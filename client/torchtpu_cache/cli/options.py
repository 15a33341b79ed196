"""Options that several commands share, and what they become: one configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtpu_cache_core.verbosity import say_more

if TYPE_CHECKING:
    from torchtpu_cache_core.config import Config

CacheDir = Annotated[Path | None, typer.Option("--cache-dir", help="This machine's cache folder.", show_default=False)]
Remote = Annotated[
    str | None, typer.Option("--remote", metavar="URL", help="The service, such as http://127.0.0.1:8077.")
]
NamespaceName = Annotated[str | None, typer.Option("--namespace", help="The tenant at the service.")]
TargetName = Annotated[str, typer.Option("--target", help="cpu, or a TPU topology such as v5e:2x2.")]
OptionsFile = Annotated[
    Path | None, typer.Option("--options", help="A file with a serialised CompileOptionsProto.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def read_config(
    cache_dir: Path | None = None, remote: str | None = None, namespace: str | None = None, **flags: Any
) -> Config:
    """The configuration of a command; ConfigError ends it with one sentence."""
    from torchtpu_cache_core import config

    read = config.load({"dir": cache_dir, "remote": remote, "namespace": namespace, **flags}).config
    if read.verbose:
        say_more()
    return read
