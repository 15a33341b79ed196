"""What Python code calls: `compile(program, target=...)`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchtpu_cache.assembly import Assembly, assemble
from torchtpu_cache.result import Result
from torchtpu_cache_core import config as configuration
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.errors import Bypass, ConfigError, InvalidRequest
from torchtpu_cache_core.perprocess import PerProcess
from torchtpu_cache_core.request import Request, Target
from torchtpu_cache_core.verbosity import say_more

if TYPE_CHECKING:
    from torchtpu_cache.compilers.base import Compiler, Loaded
    from torchtpu_cache.counters import Tier
    from torchtpu_cache_core.names import Key

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """An executable, with where it came from."""

    request: Request = field(repr=False)
    result: Result
    _compiler: Compiler = field(repr=False)

    @property
    def key(self) -> Key | None:
        """What the request hashes to; None where it bypassed the cache (`result.bypassed` says why)."""
        return self.result.key

    @property
    def tier(self) -> Tier:
        """`memory`, `disk`, `remote` or `compiled`."""
        return self.result.tier

    @property
    def executable(self) -> bytes | memoryview:
        """The serialised executable, in `request.executable_format`."""
        return self.result.executable

    def load(self) -> Loaded:
        """Makes the executable live in this process.

        Raises:
            LoadError: the target is not live here, or the executable does not load.
            Bypass: this process's environment is no longer the one that it was compiled under.
            CompilerMissing: what loads it is not installed here.
        """
        return self._compiler.load(self.result.executable, self.request)


def make_request(
    assembly: Assembly, program: bytes, target: str, options: bytes | None = None
) -> tuple[Request, Compiler]:
    """A request for `target` in this process's environment, and the compiler that can answer it.

    Without `options`, replicas and partitions are the module's own `mhlo.num_*`, with SPMD when there is more than
    one device, and with Shardy where the module is written for it.

    Raises:
        CompilerMissing: the target's compiler is not installed here.
        InvalidRequest: there is no such target, or the program is empty.
    """
    if not program:
        raise InvalidRequest("the program is empty")
    environment = _surroundings()
    if options is None:
        from torchtpu_cache_core.canonical.options import encode_options

        layout = assembly.canonicaliser.layout(program)
        options = encode_options(
            num_replicas=layout.num_replicas,
            num_partitions=layout.num_partitions,
            use_spmd_partitioning=layout.num_replicas * layout.num_partitions > 1,
            use_shardy_partitioner=layout.uses_shardy,
        )
    compiler = assembly.compilers.for_target(target)
    try:
        described = compiler.describe(target, options, environment)
    except Bypass as bypass:
        described = Target.without_identity(target, bypass.detail)
    request = Request(
        program=program,
        options=options,
        target=described,
        environment=environment,
        executable_format=compiler.executable_format,
    )
    return request, compiler


def check_target(assembly: Assembly, target: str) -> None:
    """Says early and once what would otherwise be said of every program.

    Raises:
        InvalidRequest: there is no such target.
        CompilerMissing: its compiler is not installed here.
        CompilerCrashed: its compiler does not even describe it.
    """
    from torchtpu_cache_core.canonical.options import encode_options

    environment = _surroundings()
    with contextlib.suppress(Bypass):
        options = encode_options(use_spmd_partitioning=False)
        assembly.compilers.for_target(target).describe(target, options, environment)


def _surroundings() -> Environment:
    try:
        return Environment.snapshot(os.environ, sys.argv)
    except Bypass as bypass:
        return Environment.without_identity(os.environ, bypass)


def compile_with(
    assembly: Assembly,
    program: bytes,
    *,
    target: str,
    options: bytes | None = None,
    progress: Callable[[float], None] | None = None,
) -> CompiledProgram:
    """`compile` through an assembly of the caller's own."""
    started = time.monotonic()
    request, compiler = make_request(assembly, program, target, options)
    result = assembly.node.get_or_compile(request, compiler, progress=progress)
    # The caller waited for the description of the target and the options too.
    return CompiledProgram(request, replace(result, seconds=time.monotonic() - started), compiler)


def compile(
    program: bytes | str | os.PathLike[str],
    *,
    options: bytes | None = None,
    target: str = "cpu",
) -> CompiledProgram:
    """Gets the executable of a StableHLO module from the nearest tier that has it, or compiles it.

    Args:
        program: the module as MLIR bytecode (bytes) or text (str), or a path object naming a file with either.
        options: a serialised CompileOptionsProto; by default made from the module's own replica and partition counts.
        target: `cpu`, or a TPU topology such as `v5e:2x2`.

    Raises:
        CompileError: XLA cannot make it; CompilerMissing says what to install.
        InvalidRequest: there is no such target, or the program is empty or is a file's name.
        OSError: the named file cannot be read.
    """
    if isinstance(program, os.PathLike):
        program = Path(program).read_bytes()
    elif isinstance(program, str):
        if "\n" not in program and Path(program).is_file():
            raise InvalidRequest(f"{program!r} names a file; pass pathlib.Path({program!r}) to compile what is in it")
        program = program.encode()
    return compile_with(default_assembly(), program, target=target, options=options)


_default: tuple[int, Assembly] | None = None
_default_lock = PerProcess(threading.RLock)  # guards _default and _finalized
_finalized: int | None = None  # the process that multiprocessing closes
_closed: int | None = None  # the process that has closed its assembly at its end, when no thread starts one any more


def default_assembly() -> Assembly:
    """This process's assembly, made at the first call from files and variables; a forked child makes its own."""
    global _default
    with _default_lock.get():
        if _default is None or _default[0] != os.getpid():
            _default = (os.getpid(), _assembly_of_a_job())
            atexit.register(_close_default, os.getpid())
        _have_multiprocessing_close()
        return _default[1]


def _have_multiprocessing_close() -> None:
    """It ends a forked child by os._exit, which skips atexit, and clears inherited finalizers before the child runs: so
    each child registers its own."""
    global _finalized
    process = sys.modules.get("multiprocessing.process")
    if process is not None and _finalized != os.getpid() and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _close_default, args=(os.getpid(),), exitpriority=0)
        _finalized = os.getpid()


def _assembly_of_a_job() -> Assembly:
    """A setting without sense stops a command, and never a job: it is warned about once, and does not count."""
    config = configuration.load(complain=_warn).config
    if config.verbose:
        say_more()
    try:
        return assemble(config)
    except ConfigError as error:
        _warn(error)
        return assemble(replace(config, remote=None, custom_call_targets=()))


def _warn(error: ConfigError) -> None:
    _log.warning("%s (going on without that setting)", error)


def _close_default(pid: int) -> None:
    global _closed
    if _default is None or not _default[0] == pid == os.getpid() or _closed == pid:
        return
    _closed = pid
    with contextlib.suppress(KeyboardInterrupt):  # who does not want to wait: the spool stays for the next run
        _default[1].node.drain(_default[1].config.drain_seconds)
    _default[1].close()
