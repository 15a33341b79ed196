"""What a bucket holds of one key: its generations, open or closed."""

from __future__ import annotations

from dataclasses import dataclass

from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_server.blobs.bucket import Bucket
from torchtpu_cache_server.blobs.layout import ObjectName, key_prefix, parse_generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Generations:
    """What the bucket holds of a key.

    Args:
        highest: open or closed; 0 for none.
        open: the open one.
        superseded: manifests and tombstones that a later tombstone has made void.
    """

    highest: int
    open: int | None
    superseded: list[ObjectName]


def generations_of(bucket: Bucket, namespace: Namespace, key: Key) -> Generations:
    """The generations of a key, as the bucket lists them. StoreError if it cannot say."""
    found = {info.name: parse_generation(info.name) for info in bucket.list(key_prefix(namespace, key))}
    known = [(name, generation) for name, generation in found.items() if generation is not None]
    closed = max((each.number for _, each in known if each.dead), default=0)
    highest = max((each.number for _, each in known), default=0)
    return Generations(
        highest=highest,
        open=highest if highest > closed else None,
        # The highest tombstone closes all generations before it, so one per key is enough.
        superseded=[n for n, each in known if each.number < closed or (each.number == closed and not each.dead)],
    )
