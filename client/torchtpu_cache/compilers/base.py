"""What a compiler owes to the cache: describe a target without opening a device, compile out of harm's way, load.

A compiler is described by its file's bytes, never by a version string or by what package metadata claims. Whoever
publishes an executable compares `Compiled.compiler_sha256` with the `compiler` part of the request's target first:
where they differ (a package was replaced under a running process), the executable is good for its caller and for
nobody else.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchtpu_cache_core.closing import Closing

if TYPE_CHECKING:
    import numpy

    from torchtpu_cache_core.canonical.environment import Environment
    from torchtpu_cache_core.request import Request, Target

Progress = Callable[[float], None]
"""Told about once a second, from another thread, how many seconds a compile has taken so far."""

ROAD_TOPOLOGY: Final = "topology"
"""Compiled ahead of time from a topology description: no device of the target was there."""

ROAD_CLIENT: Final = "client"
"""Compiled by a client that has the target's devices."""

COMPILE_DEADLINE_SECONDS: Final = 7200.0
"""How long one program may take by default. Real programs take minutes; a hung compiler must end some day."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A compiler's file as it lies on disk. `version` is the package's, for people; empty where it is not known."""

    library: Path
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compile gave.

    Args:
        executable: the serialised executable, in the compiler's `executable_format`.
        compile_seconds: spent in XLA, without the start of a process.
        producer: the program and version that compiled it, for people; at most 256 printable characters.
        road: ROAD_TOPOLOGY or ROAD_CLIENT.
        compiler_sha256: of the file that the compiling process had mapped; empty where that cannot be told.
            Never equal to the target's then, so that nothing is published.
    """

    executable: bytes
    compile_seconds: float
    producer: str
    road: str
    compiler_sha256: str


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """A parameter or output: dimensions in elements, and the element type's NumPy name (`float32`, `bfloat16`)."""

    dimensions: tuple[int, ...]
    dtype: str


class Loaded(abc.ABC):
    """An executable on the devices of this process."""

    @property
    @abc.abstractmethod
    def device_ids(self) -> tuple[int, ...]:
        """Global ids of the devices it runs on, in the executable's order."""

    @abc.abstractmethod
    def parameter_shapes(self) -> tuple[ArrayShape, ...]:
        """What `execute` takes, per device."""

    @abc.abstractmethod
    def execute(self, inputs: Sequence[numpy.ndarray]) -> list[numpy.ndarray]:
        """Runs it once and waits for the results.

        Args:
            inputs: one array per parameter, as one device sees it; every device is given the same.

        Returns:
            One array per output, as the first device has it.

        Raises:
            ValueError: the number, a shape or a dtype of `inputs` is not that of `parameter_shapes`.
        """


class Compiler(Closing, abc.ABC):
    """One compiler for one kind of target. Thread-safe; compiles run in killable processes, not in this one."""

    executable_format: str
    """FORMAT_PJRT or FORMAT_JAXLIB: what `compile` gives and `load` takes."""

    @abc.abstractmethod
    def describe(self, name: str, options: bytes, environment: Environment) -> Target:
        """The target called `name`. Opens no device, and loads no compiler where a memo can spare it.

        Args:
            name: `cpu`, `v5e:2x2`, ...
            options: serialised CompileOptionsProto; some targets depend on how many devices it asks for.
            environment: as the compile will see it.

        Raises:
            InvalidRequest: no such target.
            Bypass: a part that a key needs cannot be found.
            CompilerMissing: the compiler is not installed; the message says what to install.
            CompilerCrashed: the compiler died or hung over this target, or over the environment's flags.
            CompileError: the compiler failed otherwise.
        """

    @abc.abstractmethod
    def compile(self, request: Request, *, progress: Progress | None = None) -> Compiled:
        """Compiles `request.program` with exactly the request's options and environment.

        Nothing that the compiler does, an abort and an endless loop included, harms this process or the next call.

        Raises:
            InvalidRequest: the options are no CompileOptionsProto, or ask for what no machine has.
            CompileError: XLA refused the program; the message is XLA's own, shortened.
            CompilerMissing: as in `describe`.
            CompilerCrashed: the compiler's process died or overran its deadline.
        """

    @abc.abstractmethod
    def load(self, executable: bytes | memoryview, request: Request) -> Loaded:
        """Puts a checked executable on this process's own devices, with the request's options.

        The bytes run as code: they must have passed every check of an entry before.

        Raises:
            LoadError: this process has no such devices, or the executable does not become live on them.
            InvalidRequest: as in `compile`.
            Bypass: this process's environment is not the one that the executable was compiled under.
            CompilerMissing: as in `describe`.
        """

    def close(self) -> None:
        """Ends the compiler's processes. Closing twice is harmless."""
