"""The switch without a change of code: JAX imports this module, and calls `initialize`, while it looks for plugins.

It does so through the entry point group `jax_plugins`, before it makes any client. So this must cost next to nothing
in a job that did not ask, and no fault of it may reach the job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

TYPE_CHECKING = False  # as checkers see it; a job that did not ask does without `typing`
if TYPE_CHECKING:
    from typing import Any


def initialize() -> None:
    """Enables the cache where the setting `jax` says so (`TORCHTPU_CACHE_JAX=1`, or `jax = true` in a file)."""
    try:
        if wanted(os.environ):
            from torchtpu_cache.jax import enable

            enable()
    except Exception:
        _warn("JAX goes on without torchtpu-cache", exc_info=True)


def wanted(environ: Mapping[str, str]) -> bool:
    """Whether the setting `jax` is true; a value without sense is none, and is warned about when the cache starts."""
    given = environ.get("TORCHTPU_CACHE_JAX")
    if given == "1":
        return True
    if given is None:
        from torchtpu_cache_core.paths import config_files

        if not any(path.exists() for path in config_files(environ)):
            return False
    from torchtpu_cache_core import config

    return config.load(environ=environ, complain=_say).config.jax


def _say(error: Exception) -> None:
    _warn(f"{error} (going on without that setting)")


def _warn(message: str, **more: Any) -> None:
    import logging

    from torchtpu_cache.loglines import name_lines

    name_lines()
    logging.getLogger(__name__).warning("%s", message, **more)
