"""Nodes over memory stores, for programs that need no canonicaliser."""

from __future__ import annotations

from support.fakes import RawResolver, request
from torchtpu_cache.node import Node
from torchtpu_cache.result import Result
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.request import resolve
from torchtpu_cache_core.stores.memory import MemoryStore


def memory_store() -> MemoryStore:
    return MemoryStore(limit_bytes=1 << 24)


def node(**parts: object) -> Node:
    return Node(resolver=RawResolver(), **{"memory": memory_store(), **parts})  # type: ignore[arg-type]


def settled(under_test: Node, *asked: object, **options: object) -> Result:
    """`get_or_compile`, and what it leaves for later is done."""
    result = under_test.get_or_compile(*asked, **options)  # type: ignore[arg-type]
    under_test.flush()
    return result


def key_of(program: bytes = b"module {}") -> Key:
    return resolve(request(program), RawResolver()).key
