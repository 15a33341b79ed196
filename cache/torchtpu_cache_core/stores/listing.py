"""What a listing says of an entry, made from its header; every store shows the same."""

from __future__ import annotations

from collections.abc import Iterable

from torchtpu_cache_core.entry import Header
from torchtpu_cache_core.key import Component
from torchtpu_cache_core.store import EntryInfo


def target_name(components: Iterable[Component]) -> str:
    """What a person calls the target of a request: device kind and topology, or else the platform."""
    parts = {c.name.removeprefix("target."): c.text for c in components if c.name.startswith("target.") and c.text}
    shown = [parts[name] for name in ("device_kind", "topology") if name in parts]
    return " ".join(shown) or parts.get("platform", "unknown")


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
    )
