"""Where an installed jaxlib keeps XLA and MLIR, found without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def jaxlib_library() -> Path | None:
    """By far the largest library of the package: `libjax_common.so` now, `xla_extension.so` in older releases.

    None without a jaxlib. A wrong guess shows when a process that runs it has another file mapped.
    """
    try:
        spec = importlib.util.find_spec("jaxlib")
    except (ImportError, ValueError):
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    libraries = [path for folder in folders for path in Path(folder).glob("*.so")]
    return max(libraries, key=lambda path: path.stat().st_size, default=None)
