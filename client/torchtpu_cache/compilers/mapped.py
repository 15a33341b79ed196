"""Which compiler a process really runs: the file that it has mapped, not the one that a path leads to by now.

A package may be replaced under a running process. The child tells path and `stat` of its file, taken when it loaded
it; the parent hashes the path, and believes the digest only while the path still leads to that very file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtpu_cache_core.errors import Bypass

if TYPE_CHECKING:
    from torchtpu_cache_core.identity import FileIdentities


def mapped_file(is_wanted: Callable[[Path], bool]) -> dict[str, Any] | None:
    """The largest wanted file that this process has mapped, as path and `stat` signature.

    None where it was replaced since: the kernel then marks its path as deleted. Ask right after loading it. The
    device and inode in the kernel's list are not used: over an overlay file system they differ from those of `stat`.
    """
    paths: set[str] = set()
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                paths.add(fields[5])
    wanted = [path for path in paths if is_wanted(Path(path.removesuffix(" (deleted)")))]
    signatures: list[tuple[int, str, list[int]]] = []
    for path in wanted:
        try:
            signature = file_signature(path)
        except OSError:  # deleted, or its folder was
            return None
        signatures.append((signature[2], path, signature))
    if not signatures:
        return None
    _, path, signature = max(signatures)
    return {"path": path, "stat": signature}


def mapped_sha256(mapped: object, identities: FileIdentities) -> str:
    """SHA-256 of the file that `mapped_file` told of; empty where its path no longer leads to that very file."""
    match mapped:
        case {"path": str(path), "stat": list(signature)}:
            try:
                sha256 = identities.sha256(path)
                return sha256 if file_signature(path) == signature else ""
            except (Bypass, OSError):
                return ""
    return ""


def file_signature(path: Path | str) -> list[int]:
    """What changes when a file is replaced or written. OSError where it cannot be looked at."""
    found = Path(path).stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
