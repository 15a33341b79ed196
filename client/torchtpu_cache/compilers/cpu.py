"""XLA:CPU through jaxlib. Executables are in jaxlib's wrapping (FORMAT_JAXLIB), and fit the CPU that compiled them.

The target is described without importing jaxlib: its parts are the library's digest, the package's version, the device
count that options and flags ask for, and the CPU's name and features as the kernel tells them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torchtpu_cache import __version__
from torchtpu_cache.compilers import jaxlib_cpu
from torchtpu_cache.compilers.base import (
    COMPILE_DEADLINE_SECONDS,
    ROAD_CLIENT,
    Compiled,
    Compiler,
    Loaded,
    Progress,
)
from torchtpu_cache.compilers.children import ChildPool, check_options, child_environ, served
from torchtpu_cache.compilers.cpu_loaded import CpuLoaded
from torchtpu_cache.compilers.mapped import mapped_file, mapped_sha256
from torchtpu_cache.compilers.messages import blames_executable, shorten
from torchtpu_cache_core.canonical.options import device_count
from torchtpu_cache_core.errors import CompileError, InvalidRequest, LoadError
from torchtpu_cache_core.host import host_cpu
from torchtpu_cache_core.request import FORMAT_JAXLIB, Request, Target

if TYPE_CHECKING:
    from torchtpu_cache_core.canonical.environment import Environment
    from torchtpu_cache_core.identity import FileIdentities

_CHILD: Final = "torchtpu_cache.compilers.cpu_child"
_HOST_DEVICES_FLAG: Final = "xla_force_host_platform_device_count"
_MAX_DEVICES: Final = 1 << 16
"""A client makes every device that it is asked for; beyond this a flag or an option is taken for a mistake."""

_PLATFORM: Final = "cpu"
_XLA_VERSION: Final = "cpu"
"""All that a CPU client says of its own version, whatever its release."""


class CpuCompiler(Compiler):
    """The contract is Compiler's; arguments as of `compiler_for`."""

    executable_format = FORMAT_JAXLIB

    def __init__(
        self,
        identities: FileIdentities,
        *,
        pool_size: int = 1,
        deadline_seconds: float = COMPILE_DEADLINE_SECONDS,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._identities = identities
        self._environ = os.environ if environ is None else environ
        self._pool = ChildPool(_CHILD, size=pool_size, deadline_seconds=deadline_seconds)
        self._lock = threading.RLock()  # guards _clients, and the start of one
        self._clients: dict[int, Any] = {}
        self._mapped: dict[str, Any] | None = None  # jaxlib's library, once it is loaded: it stays

    def describe(self, name: str, options: bytes, environment: Environment) -> Target:
        found = jaxlib_cpu.installation()
        cpu = host_cpu()
        parts = {
            "platform": _PLATFORM,
            "platform_version": f"{_XLA_VERSION} / jaxlib {found.version}" if found.version else "",
            "compiler": self._identities.sha256(found.library),
            "device_count": str(_device_count(options, environment)),
            "cpu_name": cpu.name,
            "cpu_features": " ".join(cpu.features),
        }
        return Target.of(name, parts, position_independent=True)

    def compile(self, request: Request, *, progress: Progress | None = None) -> Compiled:
        check_options(request.options)
        found = jaxlib_cpu.installation()
        answer, executable = self._pool.call(
            child_environ(self._environ, request.environment, {}),
            served(found.library, dict(request.target.parts).get("compiler", ""), request.environment),
            {
                "library": str(found.library),
                "device_count": _device_count(request.options, request.environment),
                "options_bytes": len(request.options),
            },
            request.options + request.program,
            progress=progress,
        )
        if "error" in answer:
            raise CompileError(f"XLA refused the program: {shorten(answer['error'])}")
        return Compiled(
            executable=executable,
            compile_seconds=answer["compile_seconds"],
            producer=f"torchtpu-cache {__version__}, jaxlib {found.version}",
            road=ROAD_CLIENT,
            compiler_sha256=mapped_sha256(answer["mapped"], self._identities),
        )

    def load(self, executable: bytes | memoryview, request: Request) -> Loaded:
        check_options(request.options)
        request.environment.check_unchanged(os.environ)
        xla_client = jaxlib_cpu.import_jaxlib()
        # A target without identity has no key, so its executable comes from this very machine.
        if not request.target.unidentified:
            self._check_target(request)
        options = jaxlib_cpu.parse_options(xla_client, request.options)
        wanted = jaxlib_cpu.assigned_devices(options)
        client = self._client(xla_client, _device_count(request.options, request.environment))
        try:
            devices = jaxlib_cpu.device_list(xla_client, client, wanted)
        except KeyError as error:
            raise LoadError(f"this process has no CPU device {error.args[0]}", blames_entry=False) from None
        try:
            loaded = client.deserialize_executable(bytes(executable), devices, options)
        except (xla_client.XlaRuntimeError, ValueError, MemoryError) as error:
            message = f"XLA could not load the executable: {shorten(str(error))}"
            raise LoadError(message, blames_entry=blames_executable(error)) from None
        result = CpuLoaded(xla_client, loaded)
        if list(result.device_ids) != wanted or result.device_grid != jaxlib_cpu.device_grid(options):
            # Dropping the last reference destroys it.
            raise LoadError("the executable is for other devices than the request's")
        return result

    def close(self) -> None:
        self._pool.close()
        with self._lock:
            self._clients.clear()

    def _check_target(self, request: Request) -> None:
        """LoadError unless this process is the request's target: code for another CPU or jaxlib ends the process."""
        here = self.describe(request.target.name, request.options, request.environment)
        if here.parts != request.target.parts:
            differing = sorted({name for name, _ in set(here.parts) ^ set(request.target.parts)})
            raise LoadError(f"this process is another target: {', '.join(differing)} differ", blames_entry=False)
        if self._mapped is None:
            self._mapped = mapped_file(jaxlib_cpu.installation().library)
        if mapped_sha256(self._mapped, self._identities) != here.compiler:
            raise LoadError("this process runs another jaxlib than the one installed now", blames_entry=False)

    def _client(self, xla_client: Any, count: int) -> Any:
        with self._lock:
            if count not in self._clients:
                self._clients[count] = jaxlib_cpu.start_client(xla_client, count)
            return self._clients[count]


def _device_count(options: bytes, environment: Environment) -> int:
    """How many host devices a compile needs: what the options ask for, or the flag where it asks for more."""
    count = device_count(options)
    forced = environment.flag(_HOST_DEVICES_FLAG)
    if forced is not None:
        if not (forced.isascii() and forced.isdigit()):
            raise InvalidRequest(f"{_HOST_DEVICES_FLAG} is {forced[:40]!r}, not a number of devices")
        count = max(count, int(forced))
    if count > _MAX_DEVICES:
        raise InvalidRequest(
            f"the options and flags ask for {count:,} CPU devices; at most {_MAX_DEVICES:,} make sense"
        )
    return count
