"""What goes over HTTP (v1): paths, header names and JSON bodies, defined once for client and server.

docs/http.md is the protocol; this module is what both sides import.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from torchtpu_cache_core.errors import InvalidRequest
from torchtpu_cache_core.names import Digest, Key, Namespace
from torchtpu_cache_core.store import EntryInfo

ENTRY_CONTENT_TYPE: Final = "application/vnd.torchtpu-cache.entry"
PROBLEM_CONTENT_TYPE: Final = "application/problem+json"
MANIFEST_HEADER: Final = "TorchTPU-Cache-Manifest"
CONTENT_DIGEST_HEADER: Final = "Content-Digest"
PROBLEM_HEADER: Final = "TorchTPU-Cache-Problem"
"""A problem's kind, also where there is no body to read it from (HEAD)."""

NOT_FOUND: Final = "not_found"
"""The kind of the one problem that is a true miss: the key has no entry."""

MAX_LOOKUP_KEYS: Final = 1000
MAX_PAGE: Final = 1000


def entry_path(namespace: Namespace, key: Key) -> str:
    """`/v1/{ns}/entries/{key}`"""
    return f"/v1/{namespace}/entries/{key}"


def entries_path(namespace: Namespace) -> str:
    """`/v1/{ns}/entries`"""
    return f"/v1/{namespace}/entries"


def lookup_path(namespace: Namespace) -> str:
    """`/v1/{ns}/lookup`"""
    return f"/v1/{namespace}/lookup"


def stats_path(namespace: Namespace) -> str:
    """`/v1/{ns}/stats`"""
    return f"/v1/{namespace}/stats"


def etag(digest: Digest) -> str:
    """The strong ETag of an entry: its digest in quotes."""
    return f'"{digest}"'


def content_digest(digest: Digest) -> str:
    """The value of `Content-Digest` (RFC 9530) for an entry's digest."""
    return f"sha-256=:{base64.b64encode(bytes.fromhex(digest)).decode()}:"


def parse_content_digest(value: str) -> Digest:
    """The SHA-256 in a `Content-Digest` header, which may name other algorithms beside it.

    Raises:
        InvalidRequest: it names no SHA-256 of the right form.
    """
    for member in value.split(","):
        name, _, raw = member.strip().partition("=")
        if name == "sha-256" and raw.startswith(":") and raw.endswith(":") and len(raw) > 1:
            try:
                return Digest.from_bytes(base64.b64decode(raw[1:-1], validate=True))
            except ValueError:
                break
    raise InvalidRequest("Content-Digest must hold sha-256=:<base64 of 32 bytes>:")


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up says of a key that has an entry."""

    digest: Digest
    size_bytes: int
    compile_seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"digest": self.digest, "size_bytes": self.size_bytes, "compile_seconds": self.compile_seconds}

    @classmethod
    def from_json(cls, obj: object) -> Self:
        """InvalidRequest unless it is what `to_json` gives."""
        match obj:
            case {"digest": str(digest), "size_bytes": int(size), "compile_seconds": float() | int() as seconds}:
                return cls(Digest(digest), size, float(seconds))
        raise InvalidRequest("not an answer to a look-up")


def lookup_request(keys: Iterable[Key]) -> dict[str, Any]:
    """The body of `POST /v1/{ns}/lookup`."""
    return {"keys": list(keys)}


def parse_lookup_request(body: object) -> list[Key]:
    """InvalidRequest (or InvalidName) unless the body holds at most 1,000 keys and nothing else."""
    match body:
        case {"keys": list(keys), **rest} if not rest and len(keys) <= MAX_LOOKUP_KEYS:
            if all(isinstance(key, str) for key in keys):
                return [Key(key) for key in keys]
    raise InvalidRequest(f'a look-up is {{"keys": [...]}} with at most {MAX_LOOKUP_KEYS} keys')


def lookup_response(found: dict[Key, Found]) -> dict[str, Any]:
    """The answer to a look-up: the keys that have entries; the others are misses."""
    return {"found": {key: value.to_json() for key, value in found.items()}}


def parse_lookup_response(body: object) -> dict[Key, Found]:
    """InvalidRequest (or InvalidName) unless it is what `lookup_response` gives."""
    match body:
        case {"found": dict(found)} if len(found) <= MAX_LOOKUP_KEYS:
            return {Key(key): Found.from_json(value) for key, value in found.items()}
    raise InvalidRequest("not an answer to a look-up")


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing; `cursor` asks for the next, None ends it."""

    entries: list[EntryInfo]
    cursor: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "entries": [{name: getattr(info, name) for name in _INFO_FIELDS} for info in self.entries],
            "cursor": self.cursor,
        }

    @classmethod
    def from_json(cls, body: object) -> Self:
        """InvalidRequest (or InvalidName) unless it is what `to_json` gives."""
        match body:
            case {"entries": list(entries), "cursor": str() | None as cursor}:
                return cls([_info_from_json(entry) for entry in entries], cursor)
        raise InvalidRequest("not a page of entries")


_INFO_FIELDS: Final = {
    "key": str,
    "size_bytes": int,
    "executable_bytes": int,
    "compile_seconds": float,
    "created_seconds": float,
    "accessed_seconds": float,
    "target_name": str,
    "pinned": bool,
}


def _info_from_json(obj: object) -> EntryInfo:
    if not isinstance(obj, dict) or set(obj) != set(_INFO_FIELDS):
        raise InvalidRequest("not an entry of a listing")
    for name, kind in _INFO_FIELDS.items():
        value = obj[name]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InvalidRequest(f"{name} of a listed entry has the wrong type")
    return EntryInfo(**{**obj, "key": Key(obj["key"])})


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as the service tells it (RFC 9457).

    Args:
        status: the HTTP status.
        title: the kind of error, the same for every error of its kind.
        detail: one sentence for a person, about this one.
        kind: a FailureKind or CorruptReason value that a program may switch on.
        limit_bytes: with 413, the limit.
        digest: with 409, the digest that stands under the key.
    """

    status: int
    title: str
    detail: str
    kind: str
    limit_bytes: int | None = None
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "type": f"urn:torchtpu-cache:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "kind": self.kind,
        }
        if self.limit_bytes is not None:
            body["limit_bytes"] = self.limit_bytes
        if self.digest is not None:
            body["digest"] = self.digest
        return body

    @classmethod
    def from_json(cls, body: object, status: int) -> Self:
        """What can be read of a problem, out of bytes that may come from any proxy; never raises."""
        fields = body if isinstance(body, dict) else {}

        def text(name: str, limit: int) -> str:
            value = fields.get(name)
            return "".join(c for c in value[:limit] if c.isprintable()) if isinstance(value, str) else ""

        limit_bytes = fields.get("limit_bytes")
        return cls(
            status=status,
            title=text("title", 100),
            detail=text("detail", 300),
            kind=text("kind", 40),
            limit_bytes=limit_bytes if type(limit_bytes) is int and limit_bytes >= 0 else None,
            digest=text("digest", 64) or None,
        )
