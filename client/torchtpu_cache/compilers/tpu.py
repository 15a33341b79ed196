"""TPUs by topology: libtpu compiles for a slice that is not here, through pypjrt. Executables are raw PJRT bytes.

libtpu is never loaded into this process: it takes a lock, writes logs, and ends the process over an unknown flag.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchtpu_cache import __version__
from torchtpu_cache.compilers.base import (
    COMPILE_DEADLINE_SECONDS,
    ROAD_TOPOLOGY,
    Compiled,
    Compiler,
    Installation,
    Loaded,
    Progress,
)
from torchtpu_cache.compilers.children import ChildPool, check_options, child_environ, served
from torchtpu_cache.compilers.mapped import mapped_sha256
from torchtpu_cache.compilers.memo import TargetMemo
from torchtpu_cache.compilers.messages import shorten
from torchtpu_cache.compilers.topology import check_topology_name, refused
from torchtpu_cache_core.errors import Bypass, CompileError, CompilerMissing, LoadError
from torchtpu_cache_core.request import FORMAT_PJRT, Request, Target

if TYPE_CHECKING:
    from torchtpu_cache_core.canonical.environment import Environment
    from torchtpu_cache_core.identity import FileIdentities

_CHILD: Final = "torchtpu_cache.compilers.tpu_child"
_INSTALL_HINT: Final = "pip install 'torchtpu-cache[workers,tpu]'"
_DESCRIBE_SECONDS: Final = 120.0
"""Describing takes milliseconds, half a second for a large slice; the rest is for reading libtpu from a slow disk."""

# How to start and where to log, not what to make: none of it is in a key (docs/key.md).
_START: Final = {
    # There is no metadata server to ask for the machine's own TPU.
    "TPU_SKIP_MDS_QUERY": "1",
    # A job that uses the machine's TPU holds libtpu's lock, and so may another child.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Without them libtpu complains at length, and a crash's message may be lost behind it.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}
_LOGGING: Final = {"TPU_LOG_DIR": "disabled", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "", "TPU_VMODULE": ""}
"""Variables that a child takes over, and their defaults. libtpu takes `disabled` for a folder that is not there and
logs to /tmp, where each child would leave a file; at level 3 it opens one only when it aborts."""

_MAX_PRODUCER_CHARS: Final = 256


def installation(environ: Mapping[str, str] | None = None) -> Installation:
    """Where libtpu lies, and the package's version, which is for people only; empty for a library named by a variable.

    Raises:
        CompilerMissing: as `find_library`.
    """
    import importlib.metadata  # late: the parts that it imports cost more than a warm look-up

    library, is_package = _find(os.environ if environ is None else environ)
    try:
        version = importlib.metadata.version("libtpu") if is_package else ""
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return Installation(library, version)


def find_library(environ: Mapping[str, str]) -> Path:
    """libtpu's file: what `TPU_LIBRARY_PATH` names, else the libtpu package's, found without importing it.

    Importing the package would set the variable for the whole process.

    Raises:
        CompilerMissing: no libtpu here, or no pypjrt to drive it.
    """
    return _find(environ)[0]


def _find(environ: Mapping[str, str]) -> tuple[Path, bool]:
    if find_spec("pypjrt") is None:
        raise CompilerMissing(f"pypjrt, which drives libtpu, is not installed here; run: {_INSTALL_HINT}")
    if named := environ.get("TPU_LIBRARY_PATH"):
        if not Path(named).is_file():
            raise CompilerMissing(f"TPU_LIBRARY_PATH names {named}, which is no file; correct it or unset it")
        return Path(named).resolve(), False
    spec = find_spec("libtpu")
    library = Path(spec.origin).with_name("libtpu.so") if spec is not None and spec.origin is not None else None
    if library is None or not library.is_file():
        raise CompilerMissing(f"libtpu, the TPU compiler, is not installed here; run: {_INSTALL_HINT}")
    return library.resolve(), True


class TpuCompiler(Compiler):
    """The contract is Compiler's; arguments as of `compiler_for`."""

    executable_format = FORMAT_PJRT

    def __init__(
        self,
        identities: FileIdentities,
        memo_dir: Path | None,
        *,
        pool_size: int = 1,
        deadline_seconds: float = COMPILE_DEADLINE_SECONDS,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._identities = identities
        self._memo = TargetMemo(memo_dir)
        self._environ = os.environ if environ is None else environ
        self._pool = ChildPool(_CHILD, size=pool_size, deadline_seconds=deadline_seconds)

    def describe(self, name: str, options: bytes, environment: Environment) -> Target:
        check_topology_name(name)
        if any(road == "argv" for road, _ in environment.roads):
            raise Bypass(
                "flags_unreadable",
                "a compile by topology does not see flags on the command line; set LIBTPU_INIT_ARGS instead",
            )
        library = find_library(self._environ)
        compiler = self._identities.sha256(library)
        # A variable or flag of libtpu may change what a name stands for, so the environment is a part of the question.
        surroundings = (*environment.variables, *environment.parts)
        question = [compiler, name, *(f"{part}={value}" for part, value in surroundings)]
        # Without an identity it does not say all that the answer depends on.
        parts = None if environment.unidentified else self._memo.get(question)
        if parts is None:
            parts = self._describe(name, library, compiler, environment)
            if not environment.unidentified:
                self._memo.put(question, parts)
        return Target.of(name, {**parts, "compiler": compiler})

    def compile(self, request: Request, *, progress: Progress | None = None) -> Compiled:
        name = check_topology_name(request.target.name)
        check_options(request.options)
        library = find_library(self._environ)
        answer, executable = self._pool.call(
            self._child_environ(request.environment),
            served(library, dict(request.target.parts).get("compiler", ""), request.environment),
            {
                "op": "compile",
                "library": str(library),
                "topology": name,
                "options_bytes": len(request.options),
            },
            request.options + request.program,
            progress=progress,
        )
        if "error" in answer:
            raise CompileError(f"libtpu refused the program for {name}: {shorten(answer['error'])}")
        return Compiled(
            executable=executable,
            compile_seconds=answer["compile_seconds"],
            producer=f"torchtpu-cache {__version__}, {answer['platform_version']}"[:_MAX_PRODUCER_CHARS],
            road=ROAD_TOPOLOGY,
            compiler_sha256=mapped_sha256(answer["mapped"], self._identities),
        )

    def load(self, executable: bytes | memoryview, request: Request) -> Loaded:
        raise LoadError(
            f"{request.target.name} is not live in this process; write the executable to a file and load it on the TPU",
            blames_entry=False,
        )

    def close(self) -> None:
        self._pool.close()

    def _describe(self, name: str, library: Path, compiler: str, environment: Environment) -> dict[str, str]:
        answer, _ = self._pool.call(
            self._child_environ(environment),
            served(library, compiler, environment),
            {"op": "describe", "library": str(library), "topology": name},
            deadline_seconds=_DESCRIBE_SECONDS,
        )
        if "refused" in answer:
            raise refused(name, shorten(answer["refused"]))
        if "error" in answer:
            raise CompileError(f"libtpu could not describe {name}: {shorten(answer['error'])}")
        if mapped_sha256(answer["mapped"], self._identities) != compiler:
            raise Bypass("target_unknown", f"{library} was replaced while it described {name}")
        parts: dict[str, str] = answer["parts"]
        return parts

    def _child_environ(self, environment: Environment) -> dict[str, str]:
        logging = {name: value for name, default in _LOGGING.items() if (value := self._environ.get(name, default))}
        return child_environ(self._environ, environment, {**logging, **_START})
