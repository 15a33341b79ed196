"""Names of objects in a bucket: the one place that turns digests and keys into names, and back.

blobs/sha256/<digest>                     an entry, named by its digest
entries/<namespace>/<key>/<generation>    a manifest
entries/<namespace>/<key>/<n>.dead        generation n, and each before it, is closed for good
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.errors import InvalidName
from torchtpu_cache_core.names import Digest, Key, Namespace

BLOBS: Final = "blobs/sha256/"
ENTRIES: Final = "entries/"
PROBES: Final = "probes/"

_SEGMENT: Final = r"[a-z0-9][a-z0-9.-]{0,127}"
_OBJECT: Final = re.compile(rf"{_SEGMENT}(/{_SEGMENT}){{1,7}}")
_GENERATION: Final = re.compile(r"([1-9][0-9]{0,15})(\.dead)?")
_DEAD: Final = ".dead"


class ObjectName(str):
    """A name that matched the grammar: no empty, dotted or upward segment, so it is safe as a path."""

    __slots__ = ()

    def __new__(cls, value: str) -> ObjectName:
        if not _OBJECT.fullmatch(value):
            raise InvalidName(f"{value[:80]!r} is not the name of an object")
        return super().__new__(cls, value)


@dataclass(frozen=True, slots=True)
class Generation:
    """What the name of a manifest or tombstone says."""

    namespace: Namespace
    key: Key
    number: int
    dead: bool


def blob_name(digest: Digest) -> ObjectName:
    return ObjectName(BLOBS + digest)


def key_prefix(namespace: Namespace, key: Key) -> str:
    """What the manifests and tombstones of one key begin with."""
    return f"{ENTRIES}{namespace}/{key}/"


def manifest_name(namespace: Namespace, key: Key, generation: int) -> ObjectName:
    return ObjectName(f"{key_prefix(namespace, key)}{generation}")


def tombstone_name(namespace: Namespace, key: Key, generation: int) -> ObjectName:
    return ObjectName(f"{key_prefix(namespace, key)}{generation}{_DEAD}")


def parse_generation(name: str) -> Generation | None:
    """The parts of a manifest's or tombstone's name; None for anything else that lies in the bucket."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != ENTRIES.rstrip("/") or not (match := _GENERATION.fullmatch(parts[3])):
        return None
    try:
        return Generation(Namespace(parts[1]), Key(parts[2]), int(match[1]), match[2] is not None)
    except InvalidName:
        return None


def parse_blob(name: str) -> Digest | None:
    """The digest in a blob's name; None for anything else that lies in the bucket."""
    try:
        return Digest(name.removeprefix(BLOBS)) if name.startswith(BLOBS) else None
    except InvalidName:
        return None
