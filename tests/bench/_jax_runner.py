"""Runs a script as `python script` would, and tells afterwards how long JAX was in its compile calls.

python _jax_runner.py <report> <script> <arguments>
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    """The first line that runs; the report is written before the interpreter ends, uploads and all that not in it."""
    report, script, *arguments = sys.argv[1:]
    import jax
    from jax._src import compiler

    jax.devices()  # by now the switch has done what it does
    original = compiler.compile_or_get_cached
    spent: list[float] = []

    def timed(*args: object, **kwargs: object) -> object:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - started)

    compiler.compile_or_get_cached = timed
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    plug = sys.modules.get("torchtpu_cache.jax.plug")
    stats = None if plug is None else plug.stats()
    Path(report).write_text(json.dumps({"calls": len(spent), "seconds": sum(spent), "stats": stats}))


if __name__ == "__main__":
    main()
