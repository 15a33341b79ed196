"""What doctor asks of an installed JAX, in a process of its own: `python -m torchtpu_cache.jax.check`.

Compiles one program through the adapter, on the CPU, and prints `{"jax": version, "problem": text}`; an empty text
means that JAX takes the adapter.
"""

from __future__ import annotations

import json
import logging
from typing import Any


class _Last(logging.Handler):
    """Keeps the last warning."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def main() -> None:
    import jax

    import torchtpu_cache.jax

    said = _Last(level=logging.WARNING)
    logging.getLogger("torchtpu_cache").addHandler(said)
    problem = ""
    if not torchtpu_cache.jax.enable():
        problem = said.text or "it was refused without a reason"
    else:
        run: Any = jax.jit(lambda x: x * 2 + 1)
        run(1.0)
        counted = torchtpu_cache.jax.stats()
        if counted["bypassed"]:
            problem = f"programs are bypassed: {', '.join(counted['bypassed'])}"
        elif not counted["requests"]:
            problem = f"jax {jax.__version__} does not ask"
    print(json.dumps({"jax": jax.__version__, "problem": problem}))


if __name__ == "__main__":
    main()
