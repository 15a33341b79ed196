"""Names and limits that the canonicaliser and its child agree on. Nothing here imports jaxlib."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from torchtpu_cache_core.canonical.allowlist import MAX_TARGET_BYTES
from torchtpu_cache_core.request import ProgramIdentity

FORM_VERSION: Final = "2"
"""Changes whenever the same program could get another canonical form from the same jaxlib."""

PORTABLE_VERSION: Final = "1.13.0"
"""StableHLO version of the portable artifact: old enough for all readers, new enough for what frameworks emit."""

FORM_PORTABLE: Final = f"portable-{PORTABLE_VERSION}"
FORM_TEXT: Final = "text"
PAYLOAD_SUFFIX: Final = "+payload"
"""Added to a form whose kernels' payloads stand in it by digest."""

MODULE_NAME: Final = "main"
"""What every module is called in its canonical form; JAX puts the name of the Python function there."""

MEMORY_VARIABLE: Final = "TORCHTPU_CACHE_CHILD_MEMORY_BYTES"
"""How the parent tells the child its limit of address space."""

_MAX_CUSTOM_CALLS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What is known of a program that may be cached.

    Args:
        identity: what the key takes.
        num_replicas: `mhlo.num_replicas` of the module; None where it does not say, or cannot be read here.
        num_partitions: likewise.
        uses_shardy: it holds the `sdy` dialect, so that XLA has to partition it with Shardy.
        custom_calls: sorted targets of its custom calls, each once; empty where it could only be scanned.
    """

    identity: ProgramIdentity
    num_replicas: int | None
    num_partitions: int | None
    uses_shardy: bool
    custom_calls: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "form": self.identity.form,
            "sha256": self.identity.sha256,
            "size_bytes": self.identity.size_bytes,
            "num_replicas": self.num_replicas,
            "num_partitions": self.num_partitions,
            "uses_shardy": self.uses_shardy,
            "custom_calls": list(self.custom_calls),
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self | None:
        """What `to_json` wrote; None for anything else."""
        form, sha256, size = record.get("form"), record.get("sha256"), record.get("size_bytes")
        replicas, partitions, calls = (record.get(n) for n in ("num_replicas", "num_partitions", "custom_calls"))
        if not (isinstance(form, str) and form.isascii() and form.isprintable() and 0 < len(form) <= 64):
            return None
        if not (isinstance(sha256, str) and len(sha256) == 64 and set(sha256) <= set("0123456789abcdef")):
            return None
        if type(size) is not int or not 0 <= size < 1 << 40:
            return None
        if any(c is not None and (type(c) is not int or not 0 <= c < 1 << 31) for c in (replicas, partitions)):
            return None
        if not isinstance(shardy := record.get("uses_shardy"), bool):
            return None
        if not isinstance(calls, list) or len(calls) > _MAX_CUSTOM_CALLS:
            return None
        if any(not isinstance(call, str) or len(call) > 4 * MAX_TARGET_BYTES for call in calls):
            return None
        return cls(
            identity=ProgramIdentity(form, sha256, size),
            num_replicas=replicas,
            num_partitions=partitions,
            uses_shardy=shardy,
            custom_calls=tuple(calls),
        )
