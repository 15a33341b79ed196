"""Which compiler serves which target, and which are usable here.

A new kind is a name in `compiler_kind` and a line in `compiler_for`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchtpu_cache.compilers.base import COMPILE_DEADLINE_SECONDS, Compiler
from torchtpu_cache.compilers.topology import EXAMPLES, check_topology_name
from torchtpu_cache_core.closing import Closing
from torchtpu_cache_core.errors import CompilerMissing

if TYPE_CHECKING:
    from torchtpu_cache_core.identity import FileIdentities

CPU: Final = "cpu"
TPU: Final = "tpu"


def compiler_kind(target_name: str) -> str:
    """`cpu` or `tpu`: targets of one kind share a compiler.

    Raises:
        InvalidRequest: no target has such a name; the message names some that exist.
    """
    if target_name == CPU:
        return CPU
    check_topology_name(target_name)
    return TPU


def compiler_for(
    target_name: str,
    *,
    identities: FileIdentities,
    memo_dir: Path | None,
    pool_size: int = 1,
    deadline_seconds: float = COMPILE_DEADLINE_SECONDS,
    environ: Mapping[str, str] | None = None,
) -> Compiler:
    """A new compiler for `target_name` and every other target of its kind; the caller closes it.

    Nothing is loaded or started: a compiler that is not installed says so when it is asked to describe a target.

    Args:
        target_name: `cpu`, or a topology's name such as `v5e:2x2`.
        identities: finds and remembers the digests of compilers' files.
        memo_dir: a private folder for what is worth remembering of targets; None remembers in memory only.
        pool_size: how many programs may compile at once, each in a process of its own.
        deadline_seconds: for one program.
        environ: this process's environment by default; what a request's environment does not cover comes from it.

    Raises:
        InvalidRequest: no target has such a name.
    """
    # Late, so that a job that compiles for one target does not pay for the other's modules.
    if compiler_kind(target_name) == CPU:
        from torchtpu_cache.compilers.cpu import CpuCompiler

        return CpuCompiler(identities, pool_size=pool_size, deadline_seconds=deadline_seconds, environ=environ)
    from torchtpu_cache.compilers.tpu import TpuCompiler

    return TpuCompiler(identities, memo_dir, pool_size=pool_size, deadline_seconds=deadline_seconds, environ=environ)


class Compilers(Closing):
    """One compiler per kind, made at first use. Thread-safe; arguments as of `compiler_for`."""

    def __init__(
        self,
        *,
        identities: FileIdentities,
        memo_dir: Path | None,
        pool_size: int = 1,
        deadline_seconds: float = COMPILE_DEADLINE_SECONDS,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._identities = identities
        self._memo_dir = memo_dir
        self._pool_size = pool_size
        self._deadline_seconds = deadline_seconds
        self._environ = environ
        self._lock = threading.RLock()  # guards _compilers
        self._compilers: dict[str, Compiler] = {}

    def for_target(self, target_name: str) -> Compiler:
        """The compiler of `target_name`; it stays ours to close. InvalidRequest if no target has such a name."""
        kind = compiler_kind(target_name)
        with self._lock:
            if kind not in self._compilers:
                self._compilers[kind] = compiler_for(
                    target_name,
                    identities=self._identities,
                    memo_dir=self._memo_dir,
                    pool_size=self._pool_size,
                    deadline_seconds=self._deadline_seconds,
                    environ=self._environ,
                )
            return self._compilers[kind]

    def close(self) -> None:
        """Closes every compiler. Closing twice is harmless."""
        with self._lock:
            compilers = list(self._compilers.values())
            self._compilers.clear()
        for compiler in compilers:
            compiler.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """What `doctor` shows of one compiler.

    Args:
        kind: `cpu` or `tpu`.
        targets: names to try.
        library: the file that would be mapped; None where there is none.
        version: of the package that holds it, for people; empty where it is not known.
        problem: why the compiler is not usable here, one sentence with what to do; empty where it is.
    """

    kind: str
    targets: tuple[str, ...]
    library: Path | None
    version: str
    problem: str

    @property
    def usable(self) -> bool:
        return not self.problem


def targets_here(environ: Mapping[str, str] | None = None) -> list[Availability]:
    """Which compilers are usable here. Looks for files only: no compiler is loaded and no library is hashed."""
    from torchtpu_cache.compilers import jaxlib_cpu, tpu

    found = []
    for kind, targets, installation in (
        (CPU, (CPU,), jaxlib_cpu.installation),
        (TPU, EXAMPLES, lambda: tpu.installation(environ)),
    ):
        try:
            installed = installation()
        except CompilerMissing as error:
            found.append(Availability(kind=kind, targets=targets, library=None, version="", problem=str(error)))
        else:
            found.append(
                Availability(
                    kind=kind, targets=targets, library=installed.library, version=installed.version, problem=""
                )
            )
    return found
