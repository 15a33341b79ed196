"""One machine of the demo: a process with a disk tier of its own.

    python -m torchtpu_cache.demo.machine --cache-dir DIR --remote URL --passes N --run --target T... FILE...

Prints one JSON line per program as it is done, and one last line with the node's counters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtpu_cache.api import CompiledProgram, check_target, compile_with
from torchtpu_cache.assembly import assemble
from torchtpu_cache_core import config

if TYPE_CHECKING:
    import numpy

    from torchtpu_cache.compilers.base import ArrayShape, Loaded


def main() -> None:
    """Parses the command line above and plays the machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--remote", default="")
    parser.add_argument("--mode", default="on")
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--run", action="store_true", help="run CPU executables and digest their outputs")
    parser.add_argument("--target", action="append", required=True)
    parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    flags = {"dir": arguments.cache_dir, "remote": arguments.remote, "mode": arguments.mode}
    assembly = assemble(config.load(flags).config)
    try:
        for target in arguments.target:
            check_target(assembly, target)  # describes it, so that the first program does not bear that for all
        for number in range(1, arguments.passes + 1):
            for target in arguments.target:
                for file in arguments.files:
                    program = compile_with(assembly, file.read_bytes(), target=target)
                    _say(_program_line(number, target, file, program, arguments.run and target == "cpu"))
        waiting = assembly.node.drain(assembly.config.drain_seconds)
        _say({"counters": assembly.node.counters.snapshot(), "waiting": waiting})
    finally:
        assembly.close()


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def _program_line(number: int, target: str, file: Path, program: CompiledProgram, run: bool) -> dict[str, Any]:
    result = program.result
    return {
        "program": file.stem,
        "target": target,
        "pass": number,
        "tier": result.tier,
        "seconds": result.seconds,
        "compile_seconds": result.compile_seconds,
        "seconds_saved": result.seconds_saved,
        "executable_bytes": len(result.executable),
        "entry_bytes": result.entry_bytes,
        "executable_sha256": hashlib.sha256(result.executable).hexdigest(),
        "outputs_sha256": outputs_digest(program.load()) if run else None,
        "bypassed": result.bypassed,
    }


def outputs_digest(loaded: Loaded) -> str:
    """SHA-256 over shape, type and bytes of every output, for inputs that are the same in every process."""
    outputs = loaded.execute([_input(index, shape) for index, shape in enumerate(loaded.parameter_shapes())])
    digest = hashlib.sha256()
    for output in outputs:
        digest.update(f"{output.shape} {output.dtype}\n".encode())
        digest.update(output.tobytes())
    return digest.hexdigest()


def _input(index: int, shape: ArrayShape) -> numpy.ndarray:
    import ml_dtypes  # noqa: F401 - gives NumPy the names bfloat16 and float8
    import numpy

    generator = numpy.random.default_rng(index)
    dtype = numpy.dtype(shape.dtype)
    if dtype.kind in "iu":
        return generator.integers(0, 8, shape.dimensions).astype(dtype)
    if dtype.kind == "b":
        return generator.integers(0, 2, shape.dimensions).astype(dtype)
    return (0.1 * generator.standard_normal(shape.dimensions)).astype(dtype)


if __name__ == "__main__":
    main()
