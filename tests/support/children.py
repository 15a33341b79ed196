"""A helper process for the tests of `core.child`: does what it is told, also the worst."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torchtpu_cache_core.child import serve


def handle(header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    match header["do"]:
        case "echo":
            print("noise on standard output")
            return {"pid": os.getpid(), "folder": os.getcwd()}, payload
        case "abort":
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        case "busy":
            # One long operation of native code, which never gives the interpreter's lock away.
            Path(header["pid_file"]).write_text(str(os.getpid()))
            return {}, b"%d" % (7 ** (10**8) % 2)
        case "hang":
            if "pid_file" in header:
                Path(header["pid_file"]).write_text(str(os.getpid()))
            time.sleep(60)
        case "flood":
            for _ in range(header["megabytes"]):
                os.write(2, b"x" * (1 << 20))
            os.write(1, b"the last words")
            if header["dies"]:
                os.kill(os.getpid(), signal.SIGABRT)
        case "silent":
            os.close(1)
            os.close(2)
        case "raise":
            raise RuntimeError("an unexpected error")
        case "garbage":
            os.write(header["fd"], b"\xff" * 64)
    return {}, b""


if __name__ == "__main__":
    serve(handle)
