"""What every compile child does: answer errors instead of dying of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torchtpu_cache_core.child import serve
from torchtpu_cache_core.errors import CompilerMissing

Answer = tuple[dict[str, Any], bytes]


def serve_compiles(handler: Callable[[dict[str, Any], bytes], Answer]) -> NoReturn:
    """The child's life.

    Whatever Python error `handler` raises becomes an answer: `{"missing": message}` for CompilerMissing, and
    `{"error": message}` for any other.
    """

    def answer(header: dict[str, Any], payload: bytes) -> Answer:
        try:
            return handler(header, payload)
        except CompilerMissing as error:
            return {"missing": str(error)}, b""
        except Exception as error:  # bindings raise what they like; an abort is the parent's to see
            return {"error": str(error) or type(error).__name__}, b""

    # Where memory runs out, the kernel shall take this process before the job that waits for it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    serve(answer)
