"""What a listing says of an entry, made from its header; every store shows the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torchtpu_cache_core.header import Header
from torchtpu_cache_core.key import Component
from torchtpu_cache_core.store import EntryInfo

_MAX_SHOWN: Final = 80


def target_name(components: Iterable[Component]) -> str:
    """What a person calls the target of a request: `TPU v5 lite x 4`, or the platform where no kind is known."""
    parts = {c.name.removeprefix("target."): c.text for c in components if c.name.startswith("target.") and c.text}
    kind = parts.get("device_kind") or parts.get("platform", "unknown")
    count = parts.get("device_count", "1")
    return (kind if count == "1" else f"{kind} x {count}")[:_MAX_SHOWN]


def program_name(components: Iterable[Component]) -> str:
    """What JAX calls the program (`jit_train_step`); empty where nobody gave a name."""
    jax_key = next((component.text for component in components if component.name == "jax.key"), None)
    return (jax_key or "").rpartition("-")[0][:_MAX_SHOWN]


def entry_info(header: Header, *, size_bytes: int, accessed_seconds: float, pinned: bool = False) -> EntryInfo:
    """The listing of an entry.

    Args:
        size_bytes: of the entry as stored.
        accessed_seconds: last use as the store knows it.
    """
    return EntryInfo(
        key=header.key,
        size_bytes=size_bytes,
        executable_bytes=header.executable_bytes,
        compile_seconds=header.compile_seconds,
        created_seconds=header.created_seconds,
        accessed_seconds=accessed_seconds,
        target_name=target_name(header.components),
        pinned=pinned,
        program=program_name(header.components),
    )
