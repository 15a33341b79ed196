"""Which compiler a process really runs: the file that it has mapped, not the one that a path leads to by now.

A package may be replaced under a running process. The child tells path and `stat` of its file, taken when it loaded
it; the parent hashes the path, and believes the digest only while the path still leads to that very file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.identity import signature_of

if TYPE_CHECKING:
    from torchtpu_cache_core.identity import FileIdentities


def mapped_file(library: Path) -> dict[str, Any] | None:
    """Path and `stat` signature of `library`, if this process has it mapped; ask right after loading it.

    None where another file was loaded, or the file was replaced since: the kernel then marks its path as deleted. The
    device and inode in the kernel's list are not used: over an overlay file system they differ from those of `stat`.
    """
    path = str(library.resolve())
    try:
        signature = _signature(path)
    except OSError:
        return None
    # Read after `stat`, so that a file replaced in between shows as deleted.
    return {"path": path, "stat": signature} if path in mapped_paths() else None


def mapped_paths() -> set[str]:
    """Every file that this process has mapped; one that was replaced since shows with ` (deleted)` at its end."""
    maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    # A path is the last field, and the only one with a slash.
    return {line[start:] for line in maps.split("\n") if (start := line.find("/")) >= 0}


def mapped_sha256(mapped: object, identities: FileIdentities) -> str:
    """SHA-256 of the file that `mapped_file` told of; empty where its path no longer leads to that very file."""
    match mapped:
        case {"path": str(path), "stat": list(signature)}:
            try:
                sha256 = identities.sha256(path)
                return sha256 if _signature(path) == signature else ""
            except (Bypass, OSError):
                return ""
    return ""


def _signature(path: str) -> list[int]:
    return list(signature_of(Path(path).stat()))
