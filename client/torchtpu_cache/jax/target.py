"""What a live client of JAX compiles for. Its compiler is the file that this process has mapped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchtpu_cache.compilers.mapped import mapped_file, mapped_paths, mapped_sha256
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.host import host_cpu
from torchtpu_cache_core.jaxlib_library import jaxlib_library
from torchtpu_cache_core.request import Target

if TYPE_CHECKING:
    from torchtpu_cache_core.identity import FileIdentities

_CPU: Final = "cpu"
_TPU: Final = "tpu"
_LIBTPU: Final = "libtpu"
_CPU_VERSIONS: Final = ("cpu", "<unknown>")
"""What jaxlib's own client of the CPU says; the latter up to 0.4. A plugin may call itself cpu too."""

_RUNTIMES: Final = ("pjrt_ifrt", "tfrt", "stream_executor")
"""Clients whose compiler is in this process; a proxy's is elsewhere."""


class Targets:
    """Describes clients; thread-safe. A file is hashed once in a process, since what is mapped stays mapped."""

    def __init__(self, identities: FileIdentities) -> None:
        self._identities = identities
        self._lock = threading.RLock()  # guards _known; held while a file is hashed, so that it is hashed once
        self._known: dict[str, dict[str, str]] = {}

    def describe(self, backend: Any, devices: Any) -> Target:
        """The target of a program for `devices`, an array of the devices of `backend` in the program's order.

        Raises:
            Bypass: `target_unknown`, where the compiler or the CPU cannot be identified.
        """
        platform = str(backend.platform)
        version = str(backend.platform_version)
        if backend.runtime_type not in _RUNTIMES:
            raise Bypass("target_unknown", f"nothing is known of the runtime {backend.runtime_type}")
        with self._lock:
            parts = self._known.get(f"{platform} {version}")
            if parts is None:
                parts = self._known[f"{platform} {version}"] = self._parts(platform, version)
        flat = list(devices.flat)
        kinds = sorted({str(device.device_kind) for device in flat})
        shown = {"device_count": str(len(flat)), "device_kind": ", ".join(kinds)}
        if platform == _TPU:
            shown["device_coords"] = " ".join(_coordinates(device) for device in flat)
        return Target.of(platform, parts | shown)

    def _parts(self, platform: str, version: str) -> dict[str, str]:
        jaxlib = self._jaxlib()
        if platform == _CPU and version in _CPU_VERSIONS:
            cpu = host_cpu()
            return {
                "platform": platform,
                "platform_version": version,
                "compiler": jaxlib,
                "cpu_name": cpu.name,
                "cpu_features": " ".join(cpu.features),
            }
        if platform == _TPU:
            return {
                "platform": platform,
                "platform_version": version,
                "compiler": self._mapped_library(_LIBTPU),
                "jaxlib": jaxlib,
            }
        raise Bypass("target_unknown", f"the compiler of the platform {platform} cannot be told from its files")

    def _jaxlib(self) -> str:
        library = jaxlib_library()
        if library is None:
            raise Bypass("target_unknown", "jaxlib holds no library")
        return self._sha256(library)

    def _mapped_library(self, stem: str) -> str:
        mapped = map(Path, mapped_paths())
        paths = [path for path in mapped if path.name.split(".")[0] == stem and ".so" in path.name]
        if len(paths) != 1:
            raise Bypass("target_unknown", f"{len(paths)} files called {stem}.so are mapped, not one")
        return self._sha256(paths[0])

    def _sha256(self, library: Path) -> str:
        sha256 = mapped_sha256(mapped_file(library), self._identities)
        if not sha256:
            raise Bypass("target_unknown", f"{library} is not what this process has mapped")
        return sha256


def _coordinates(device: Any) -> str:
    """Where a chip is, and which of its cores: it is not proved that code does not depend on it."""
    coords = getattr(device, "coords", None)
    if coords is None:
        raise Bypass("target_unknown", f"{device} does not say where it is")
    return f"{','.join(map(str, coords))}/{getattr(device, 'core_on_chip', 0)}"
