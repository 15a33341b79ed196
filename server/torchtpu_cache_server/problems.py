"""Errors as HTTP tells them: the one table from error to status, and the RFC 9457 document."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable
from typing import Any, Final

from torchtpu_cache_core import wire
from torchtpu_cache_core.errors import (
    CacheError,
    CorruptEntry,
    EntryTooLarge,
    FailureKind,
    InvalidName,
    InvalidRequest,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.wire import MANIFEST_HEADER, PROBLEM_CONTENT_TYPE, PROBLEM_HEADER, Problem, etag

Headers = list[tuple[bytes, bytes]]


class ProblemKind(enum.StrEnum):
    """Kinds beside those of FailureKind and CorruptReason."""

    NOT_FOUND = wire.NOT_FOUND
    """The key has no entry: a true miss."""
    NO_SUCH_PATH = "no_such_path"
    """Nothing lives under this path; never a miss."""
    CONFLICT = "conflict"
    METHOD = "method"
    INVALID = "invalid"
    LENGTH_REQUIRED = "length_required"
    MISDIRECTED = "misdirected"
    ORIGIN = "origin"
    PEER = "peer"
    INTERNAL = "internal"


_TITLES: Final = {
    400: "The request makes no sense",
    403: "Not allowed",
    404: "Not found",
    405: "Not allowed here",
    408: "Too slow",
    409: "Another entry stands under this key",
    411: "A length is required",
    413: "Too large",
    415: "Unknown coding",
    421: "Not for this host",
    422: "Not what it should be",
    431: "Too many headers",
    500: "The service failed",
    503: "The service cannot answer now",
    507: "No room",
}


class Refusal(Exception):
    """Ends a request with a problem document.

    Args:
        retry_after_seconds: what `Retry-After` says.
        standing: the manifest that a conflicting put met.
        closes: the connection ends with the answer, because what follows on it cannot be trusted or awaited.
        allow: methods, with 405.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        limit_bytes: int | None = None,
        retry_after_seconds: float | None = None,
        standing: Manifest | None = None,
        closes: bool = False,
        allow: str | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = Problem(
            status=status,
            title=_TITLES.get(status, "The request failed"),
            detail=detail,
            kind=kind,
            limit_bytes=limit_bytes,
            digest=None if standing is None else standing.digest,
        )
        self._retry_after_seconds = retry_after_seconds
        self._standing = standing
        self._closes = closes
        self._allow = allow

    def answer(self) -> tuple[int, Headers, bytes]:
        """Status, headers and body."""
        body = json.dumps(self.problem.to_json()).encode()
        headers = [
            (b"content-type", PROBLEM_CONTENT_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (PROBLEM_HEADER.lower().encode(), self.problem.kind.encode()),
            (b"cache-control", b"no-store"),
        ]
        if self._retry_after_seconds is not None:
            headers.append((b"retry-after", str(math.ceil(self._retry_after_seconds)).encode()))
        if self._standing is not None:
            headers.append((b"etag", etag(self._standing.digest).encode()))
            headers.append((MANIFEST_HEADER.lower().encode(), self._standing.to_header().encode()))
        if self._allow is not None:
            headers.append((b"allow", self._allow.encode()))
        if self._closes:
            headers.append((b"connection", b"close"))
        return self.problem.status, headers, body


def no_entry() -> Refusal:
    return Refusal(404, ProblemKind.NOT_FOUND, "the key has no entry in this namespace")


def conflict(standing: Manifest) -> Refusal:
    return Refusal(409, ProblemKind.CONFLICT, "another entry stands under this key, and stays", standing=standing)


def refusal_of(error: CacheError, *, uploading: bool = False) -> Refusal:
    """What an error of the layers below means over HTTP. What is the service's own affair is told as its kind only.

    Args:
        uploading: the bytes at fault are the client's.
    """
    match error:
        case InvalidName() | InvalidRequest():
            return Refusal(400, ProblemKind.INVALID, str(error))
        case EntryTooLarge():
            return Refusal(413, error.kind, str(error), limit_bytes=error.limit_bytes)
        case CorruptEntry() if uploading:
            return Refusal(422, error.reason, str(error))
        case CorruptEntry():
            return Refusal(500, error.kind, "the stored entry was damaged and is set aside; it can be put again")
        case StoreFull():
            return Refusal(507, error.kind, "the service has no room for the entry")
        case StoreUnavailable():
            wait = 1.0 if error.retry_after_seconds is None else error.retry_after_seconds
            return Refusal(503, error.kind, "the service's storage did not answer", retry_after_seconds=wait)
        case StoreError(kind=FailureKind.READ_ONLY):
            # As where there is no room: it may pass, and what is there is served meanwhile.
            return Refusal(507, error.kind, "the service's disk is read-only now; what it holds is served")
        case StoreError():
            return Refusal(500, FailureKind.SERVER_ERROR, "the service's storage refused; its log says why")
    return Refusal(500, FailureKind.SERVER_ERROR, "the service failed; its log says why")


def is_failure(error: CacheError, *, uploading: bool = False) -> bool:
    """Whether an error is the service's own, and not the client's."""
    return refusal_of(error, uploading=uploading).problem.status >= 500 and not isinstance(error, StoreFull)


async def send_refusal(send: Any, refusal: Refusal) -> None:
    """The whole answer over ASGI."""
    status, headers, body = refusal.answer()
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """The value of a header that may stand once.

    Raises:
        Refusal: it stands more than once, so that two readers could see two values.
    """
    values = [value for key, value in headers if key == name]
    if len(values) > 1:
        raise Refusal(400, ProblemKind.INVALID, f"the header {name.decode()} stands more than once", closes=True)
    return values[0].decode("latin-1").strip() if values else None
