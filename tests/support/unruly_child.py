"""A compile child that misbehaves on demand: `{"do": ...}` says how."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torchtpu_cache.compilers.childside import serve_compiles
from torchtpu_cache_core.errors import CompilerMissing


def _handle(header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    match header["do"]:
        case "echo":
            return {"pid": os.getpid(), "environ": dict(os.environ)}, payload
        case "noise":
            print("noise on standard output " * 1000)
            os.write(1, b"and past Python")
            return {}, payload
        case "raise":
            raise ValueError(header["message"])
        case "missing":
            raise CompilerMissing(header["message"])
        case "abort":
            sys.stderr.write(header["message"])
            sys.stderr.flush()
            os.abort()
        case "hang":
            time.sleep(600)
        case "killed":
            if Path(header.get("spared_by", "/nowhere")).exists():
                return {"pid": os.getpid()}, payload
            if "spared_by" in header:
                Path(header["spared_by"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(header)


if __name__ == "__main__":
    serve_compiles(_handle)
