"""Compiles for the CPU: `python -m torchtpu_cache.compilers.cpu_child`, started by CpuCompiler only.

Request: `{"library": str, "device_count": int, "options_bytes": int}`, payload options and program. Answer:
`{"compile_seconds": float, "mapped": what mapped_file gives}` and the serialised executable, or `{"error": str}`.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from torchtpu_cache.compilers import jaxlib_cpu
from torchtpu_cache.compilers.childside import Answer, serve_compiles
from torchtpu_cache.compilers.mapped import mapped_file


@functools.cache
def _jaxlib(library: str) -> tuple[Any, dict[str, Any] | None]:
    # Kept from the moment of loading: a path that is looked up later may lead to another file.
    return jaxlib_cpu.import_jaxlib(), mapped_file(Path(library))


@functools.cache
def _client(xla_client: Any, device_count: int) -> Any:
    return jaxlib_cpu.start_client(xla_client, device_count)


def _compile(header: dict[str, Any], payload: bytes) -> Answer:
    xla_client, mapped = _jaxlib(header["library"])
    options_bytes: int = header["options_bytes"]
    options = jaxlib_cpu.parse_options(xla_client, payload[:options_bytes])
    jaxlib_cpu.make_logical(xla_client, options)
    client = _client(xla_client, header["device_count"])
    devices = jaxlib_cpu.device_list(xla_client, client, jaxlib_cpu.assigned_devices(options))
    started = time.perf_counter()
    executable = client.compile_and_load(payload[options_bytes:], devices, options)
    compile_seconds = time.perf_counter() - started
    return {"compile_seconds": compile_seconds, "mapped": mapped}, executable.serialize()


def main() -> None:
    serve_compiles(_compile)


if __name__ == "__main__":
    main()
