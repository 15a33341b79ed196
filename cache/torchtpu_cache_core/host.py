"""The CPU that this machine compiles for, as the kernel describes it; no XLA client is started."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchtpu_cache_core.errors import Bypass

_CPUINFO: Final = Path("/proc/cpuinfo")

_NAME_FIELDS: Final = (
    ("vendor_id", "cpu family", "model", "stepping", "model name"),  # x86
    ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),  # Arm
)
_FEATURE_FIELDS: Final = ("flags", "Features")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCpu:
    """What decides which instructions XLA:CPU may use here.

    Args:
        name: vendor, family, model, stepping and model name as `field=value` pairs, for every kind of core.
        features: sorted, each once, in the kernel's spelling; where cores differ, what all of them have.
    """

    name: str
    features: tuple[str, ...]


@functools.cache
def host_cpu(cpuinfo: Path = _CPUINFO) -> HostCpu:
    """The CPU of this machine; read once in a process.

    Raises:
        Bypass: the kernel's description is absent or names no features, so executables cannot be told apart.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise Bypass("target_unknown", f"{cpuinfo} cannot be read: {error.strerror}") from None
    names: set[str] = set()
    features: set[frozenset[str]] = set()
    for block in text.split("\n\n"):
        fields = _fields(block)
        listed = next((fields[field] for field in _FEATURE_FIELDS if field in fields), None)
        if listed is None:
            continue
        features.add(frozenset(listed.split()))
        for wanted in _NAME_FIELDS:
            if wanted[0] in fields:
                names.add(",".join(f"{field}={fields.get(field, '')}" for field in wanted))
    shared = frozenset.intersection(*features) if features else frozenset()
    if not names or not shared:
        raise Bypass("target_unknown", f"{cpuinfo} names no CPU with its features")
    return HostCpu(name=" | ".join(sorted(names)), features=tuple(sorted(shared)))


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}
