"""Describes and compiles for TPUs that are not here: `python -m torchtpu_cache.compilers.tpu_child`, for TpuCompiler.

libtpu has one set of flags and one library per process, so a child serves one of each. Requests and answers:

- `{"op": "describe", "library": str, "topology": str}`: `{"parts": {str: str}, "mapped": what mapped_file gives}`, or
  `{"refused": str}` for a topology that libtpu does not make.
- `{"op": "compile", "library": str, "topology": str, "options_bytes": int}`, payload options and program:
  `{"compile_seconds": float, "platform_version": str, "mapped": as above}`, payload the raw PJRT bytes.
- Any other failure: `{"error": str}`.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from torchtpu_cache.compilers.childside import Answer, serve_compiles
from torchtpu_cache.compilers.mapped import mapped_file
from torchtpu_cache.compilers.topology import platform_version, target_parts


class _SerialisedOptions:
    """A CompileOptionsProto that pypjrt passes on as it is; its own options object would set fields by guessing."""

    def __init__(self, serialised: bytes) -> None:
        self._serialised = serialised

    def encode(self, abi: Any) -> bytes:
        return self._serialised


@functools.cache
def _plugin(library: str) -> tuple[Any, dict[str, Any] | None]:
    from pypjrt import Plugin

    plugin = Plugin(library)
    # Kept from the moment of loading: a path that is looked up later may lead to another file.
    mapped = mapped_file(Path(library))
    plugin.initialize()
    return plugin, mapped


@functools.cache
def _topology(library: str, name: str) -> Any:
    from pypjrt import Topology

    return Topology.create(_plugin(library)[0], name)


def _describe(library: str, name: str) -> Answer:
    from pypjrt import errors

    try:
        topology = _topology(library, name)
    except (errors.InvalidArgument, errors.NotFound) as error:
        return {"refused": str(error)}, b""
    parts = target_parts(
        platform=topology.platform_name,
        version=topology.platform_version,
        attributes=topology.attributes,
        devices=topology.device_descriptions(),
        fingerprint=topology.fingerprint(),
    )
    return {"parts": parts, "mapped": _plugin(library)[1]}, b""


def _compile(library: str, name: str, options: bytes, program: bytes) -> Answer:
    topology = _topology(library, name)
    started = time.perf_counter()
    executable = topology.compile(program, options=_SerialisedOptions(options))
    answer = {
        "compile_seconds": time.perf_counter() - started,
        "platform_version": platform_version(topology.platform_version),
        "mapped": _plugin(library)[1],
    }
    return answer, executable


def _handle(header: dict[str, Any], payload: bytes) -> Answer:
    library, name = header["library"], header["topology"]
    if header["op"] == "describe":
        return _describe(library, name)
    options_bytes: int = header["options_bytes"]
    return _compile(library, name, payload[:options_bytes], payload[options_bytes:])


def main() -> None:
    serve_compiles(_handle)


if __name__ == "__main__":
    main()
