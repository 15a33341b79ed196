"""torchtpu-cache: every XLA program of a fleet is compiled once, anywhere, and is then ready everywhere.

    import torchtpu_cache

    program = torchtpu_cache.compile(module_bytes, target="v5e:2x2")
    program.tier, program.executable

Everything here is loaded at its first use, so that importing the package costs a job nothing.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as checkers see it; `typing` alone would be a third of what this import takes
if TYPE_CHECKING:
    from typing import Any

    from torchtpu_cache.api import CompiledProgram, compile
    from torchtpu_cache.counters import Tier
    from torchtpu_cache.node import Node
    from torchtpu_cache.result import Result
    from torchtpu_cache_core import __version__
    from torchtpu_cache_core.config import Config, Mode
    from torchtpu_cache_core.errors import (
        CacheError,
        CompileError,
        CompilerCrashed,
        CompilerMissing,
        ConfigError,
        InvalidRequest,
        LoadError,
    )

__all__ = [
    "CacheError",
    "CompileError",
    "CompiledProgram",
    "CompilerCrashed",
    "CompilerMissing",
    "Config",
    "ConfigError",
    "InvalidRequest",
    "LoadError",
    "Mode",
    "Node",
    "Result",
    "Tier",
    "__version__",
    "compile",
]

_ERRORS = "torchtpu_cache_core.errors"
_HOMES = {
    "CacheError": _ERRORS,
    "CompileError": _ERRORS,
    "CompiledProgram": "torchtpu_cache.api",
    "CompilerCrashed": _ERRORS,
    "CompilerMissing": _ERRORS,
    "Config": "torchtpu_cache_core.config",
    "ConfigError": _ERRORS,
    "InvalidRequest": _ERRORS,
    "LoadError": _ERRORS,
    "Mode": "torchtpu_cache_core.config",
    "Node": "torchtpu_cache.node",
    "Result": "torchtpu_cache.result",
    "Tier": "torchtpu_cache.counters",
    "__version__": "torchtpu_cache_core",
    "compile": "torchtpu_cache.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
