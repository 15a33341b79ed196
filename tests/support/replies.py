"""What a well-behaved service would answer, as bytes, for scripts of `RawServer`."""

from __future__ import annotations

import json

from support.rawserver import answer
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Namespace


def manifest_of(entry: Entry, namespace: Namespace = DEFAULT_NAMESPACE) -> Manifest:
    """The manifest that a service without signatures gives out."""
    return Manifest(
        namespace=namespace,
        key=entry.key,
        generation=1,
        digest=entry.digest,
        size_bytes=entry.size_bytes,
        writer="local",
        created_seconds=1_764_500_000.0,
    )


def entry_headers(entry: Entry) -> dict[str, str]:
    return {"ETag": wire.etag(entry.digest), wire.MANIFEST_HEADER: manifest_of(entry).to_header()}


def hit(entry: Entry, body: bytes | None = None, **replaced: str) -> bytes:
    """200 with the entry; `body` and headers (with `_` for `-`) stand in for the right ones."""
    headers = entry_headers(entry) | {name.replace("_", "-"): value for name, value in replaced.items()}
    return answer(200, bytes(entry.buffer) if body is None else body, wire.ENTRY_CONTENT_TYPE, **headers)


def problem(
    status: int, kind: str, *, limit_bytes: int | None = None, digest: str | None = None, **headers: str
) -> bytes:
    """A problem document of our service."""
    said = wire.Problem(status, "A title", "One sentence.", kind, limit_bytes=limit_bytes, digest=digest)
    headers = {"TorchTPU-Cache-Problem": kind} | headers
    return answer(status, json.dumps(said.to_json()).encode(), wire.PROBLEM_CONTENT_TYPE, **headers)


def miss() -> bytes:
    return problem(404, "not_found")


def head_of(raw: bytes) -> bytes:
    """Without its body, as the answer to HEAD."""
    return raw[: raw.index(b"\r\n\r\n") + 4]
