"""The blob path: GET, HEAD and PUT of one entry as plain ASGI, because a framework costs more here than the work.

A read goes out in pieces of 256 KiB. Each is read without blocking where the kernel has it at hand, and in a thread
only where not; after each the event loop gets its turn, so that one fast reader of a large entry starves nobody.
A put streams through the checks into a temporary file, in threads; at most one piece of it is in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from torchtpu_cache_core.errors import CacheError, InvalidName, InvalidRequest
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key, Namespace
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.wire import (
    CONTENT_DIGEST_HEADER,
    ENTRY_CONTENT_TYPE,
    MANIFEST_HEADER,
    content_digest,
    etag,
    parse_content_digest,
)
from torchtpu_cache_server.blobs.bucket import OpenObject
from torchtpu_cache_server.edge import ClientGone, Edge, content_length
from torchtpu_cache_server.problems import (
    Headers,
    ProblemKind,
    Refusal,
    conflict,
    header,
    no_entry,
    refusal_of,
)
from torchtpu_cache_server.service import OpenEntry

Receive = Callable[[], Any]
Send = Callable[[Any], Any]

PIECE_BYTES: Final = 256 << 10
REMEMBER: Final = "torchtpu_cache.remember"
"""In a scope: to be called with the name of the entry that was the answer to all that the head says."""

_MAX_IGNORED_BYTES: Final = 16 << 20
_SHORT_BYTES: Final = 1 << 20
_SOON_SECONDS: Final = 0.25
_PATIENT_SECONDS: Final = 2.0
_WOULD_BLOCK: Final = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL})
"""EAGAIN: not in the page cache. The others: a file system or kernel that cannot read without blocking."""


class EntryHandler:
    """Answers GET, HEAD and PUT under `/v1/{namespace}/entries/{key}`."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    async def __call__(self, scope: Any, receive: Receive, send: Send, namespace: str, key: str) -> None:
        """Raises Refusal before the answer has begun, ClientGone where nobody waits for one."""
        try:
            where = Namespace(namespace), Key(key)
        except InvalidName as error:
            raise refusal_of(error) from error
        if scope["method"] == "PUT":
            await self._put(scope, receive, send, *where)
        else:
            await self._get(scope, send, *where)

    # reading

    async def _get(self, scope: Any, send: Send, namespace: Namespace, key: Key) -> None:
        edge = self._edge
        found = await self._open(namespace, key)
        if found is None:
            edge.metrics.read("miss")
            raise no_entry()
        with found.blob as blob:
            if_none_match = header(scope["headers"], b"if-none-match")
            if _is_known(if_none_match, found.manifest.digest):
                edge.metrics.read("not_modified")
                headers = [*entry_headers(found.manifest)]
                await send({"type": "http.response.start", "status": 304, "headers": headers})
                await send({"type": "http.response.body"})
                return
            await send({"type": "http.response.start", "status": 200, "headers": [*found_headers(found.manifest)]})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body"})
                return
            edge.metrics.read("hit")
            if REMEMBER in scope and if_none_match is None:
                scope[REMEMBER]((namespace, key))
            await self._send_blob(send, blob)
        edge.metrics.sent_bytes.inc(found.manifest.size_bytes)

    async def _open(self, namespace: Namespace, key: Key) -> OpenEntry | None:
        edge = self._edge
        try:
            found = edge.service.open_hot(namespace, key)
            if found is None:
                found = await edge.holding(edge.service.open, namespace, key)
        except CacheError as error:
            edge.metrics.read("error")
            edge.note_failure(error)
            raise refusal_of(error) from error
        edge.health.succeeded()
        return found

    async def _send_blob(self, send: Send, blob: OpenObject) -> None:
        offset, size = 0, blob.size_bytes
        while True:
            piece = read_at_hand(blob, offset, min(PIECE_BYTES, size - offset))
            if piece is None:
                piece = await self._edge.blocking(blob.read_at, offset, min(PIECE_BYTES, size - offset))
            if not piece:
                # The answer has begun, so the only honest end is a broken connection.
                raise OSError(errno.EIO, "a blob ended before its length")
            offset += len(piece)
            message = {"type": "http.response.body", "body": piece, "more_body": offset < size}
            if offset >= size and offset <= PIECE_BYTES:
                await send(message)
                return
            async with asyncio.timeout(self._edge.idle_seconds):
                await send(message)
            if offset >= size:
                return
            await asyncio.sleep(0)

    # writing

    async def _put(self, scope: Any, receive: Receive, send: Send, namespace: Namespace, key: Key) -> None:
        edge = self._edge
        body = _Body(edge, scope, receive)
        try:
            with edge.metrics.uploads.track_inprogress():
                status, manifest = await self._take(scope, body, namespace, key)
        except Refusal as refusal:
            edge.metrics.put("refused")
            await body.refuse(send, refusal)
        except CacheError as error:
            failed = refusal_of(error, uploading=True)
            edge.metrics.put("refused" if failed.problem.status < 500 else "error")
            edge.note_failure(error, uploading=True)
            await body.refuse(send, failed)
        else:
            edge.health.succeeded()
            edge.metrics.put(status)
            if status is PutStatus.CONFLICT:
                await body.refuse(send, conflict(manifest))
                return
            headers = [*entry_headers(manifest), (b"content-length", b"0")]
            await body.answer(send, 201 if status is PutStatus.CREATED else 200, headers, b"")

    async def _take(self, scope: Any, body: _Body, namespace: Namespace, key: Key) -> tuple[PutStatus, Manifest]:
        edge = self._edge
        digest, size_bytes = body.announced(scope["headers"])
        standing = await edge.blocking(edge.service.standing, namespace, key)
        if standing is not None:
            # Nothing that could follow changes the answer.
            return (PutStatus.SAME if standing.digest == digest else PutStatus.CONFLICT), standing
        incoming = await edge.holding(edge.service.receive, namespace, key, digest, size_bytes)
        try:
            async for piece in body.pieces():
                await edge.blocking(incoming.feed, piece)
                edge.metrics.received_bytes.inc(len(piece))
            return await edge.blocking(incoming.commit)
        finally:
            # A cancelled request still gives back what it holds, behind whatever thread is at work on it.
            await asyncio.shield(edge.blocking(incoming.close))


class _Body:
    """The body of a put: announced, read piece by piece, or answered without being read."""

    def __init__(self, edge: Edge, scope: Any, receive: Receive) -> None:
        self._edge = edge
        self._receive = receive
        self._expects = header(scope["headers"], b"expect") is not None
        self._left: int | None = None
        self._ended = False

    def announced(self, headers: Headers) -> tuple[Digest, int]:
        """Digest and size that the client announces. Refusal (400, 411, 415), EntryTooLarge."""
        if header(headers, b"transfer-encoding") is not None:
            raise Refusal(
                411, ProblemKind.LENGTH_REQUIRED, "an entry needs a Content-Length, not a chunked body", closes=True
            )
        size_bytes = content_length(header(headers, b"content-length"))
        if size_bytes is None:
            raise Refusal(411, ProblemKind.LENGTH_REQUIRED, "an entry needs a Content-Length", closes=True)
        self._left = size_bytes
        coding = header(headers, b"content-encoding")
        if coding is not None and coding.lower() != "identity":
            raise Refusal(415, ProblemKind.INVALID, "an entry is sent as it is, without a Content-Encoding")
        value = header(headers, CONTENT_DIGEST_HEADER.lower().encode())
        if value is None:
            raise Refusal(400, ProblemKind.INVALID, "a put needs a Content-Digest header with the entry's sha-256")
        try:
            digest = parse_content_digest(value)
        except InvalidRequest as error:
            raise refusal_of(error) from error
        self._edge.service.check_size(size_bytes)
        return digest, size_bytes

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body in pieces of about 256 KiB. Refusal (408) or ClientGone where it stops."""
        buffer = bytearray()
        while not self._ended:
            piece, more = await self._next()
            buffer += piece
            if len(buffer) >= PIECE_BYTES or not more:
                if buffer:
                    yield bytes(buffer)
                buffer.clear()

    async def _next(self, idle_seconds: float | None = None) -> tuple[bytes, bool]:
        piece, more = await self._edge.body_piece(self._receive, idle_seconds)
        self._ended = not more
        if self._left is not None:
            self._left -= len(piece)
        return piece, more

    async def refuse(self, send: Send, refusal: Refusal) -> None:
        await self.answer(send, *refusal.answer())

    async def answer(self, send: Send, status: int, headers: Headers, content: bytes) -> None:
        """Answers, and then lets a body that nobody needs run dry, within bounds.

        A connection that is closed on bytes not yet read is reset, and a client may then lose the answer. One that
        waits for `100 Continue` has sent nothing and must not be asked for more.
        """
        if not self._expects and self._left is not None and self._left <= _SHORT_BYTES:
            await self._run_dry(_SOON_SECONDS)  # costs less than a new connection
        if self._ended:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": content})
            return
        if not any(name == b"connection" for name, _ in headers):
            headers = [*headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": True})
        if not self._expects:
            await self._run_dry(_PATIENT_SECONDS)
        await send({"type": "http.response.body"})

    async def _run_dry(self, idle_seconds: float) -> None:
        room = _MAX_IGNORED_BYTES
        if self._left is not None and self._left <= self._edge.service.limits.max_entry_bytes:
            room = max(room, self._left)
        # Nobody needs these bytes; whatever ends them early ends the connection with the answer.
        with contextlib.suppress(Refusal, ClientGone):
            while not self._ended and room > 0:
                room -= len((await self._next(idle_seconds))[0])


def entry_headers(manifest: Manifest) -> tuple[tuple[bytes, bytes], ...]:
    """What every answer with an entry, or about one, says of it."""
    return (
        (b"etag", etag(manifest.digest).encode()),
        (CONTENT_DIGEST_HEADER.lower().encode(), content_digest(manifest.digest).encode()),
        (MANIFEST_HEADER.lower().encode(), manifest.to_header().encode()),
        # An entry may be deleted at any time, and its bytes are what its digest says.
        (b"cache-control", b"no-cache, no-transform"),
    )


@functools.lru_cache(maxsize=256)  # a manifest and its headers take 5 kB
def found_headers(manifest: Manifest) -> tuple[tuple[bytes, bytes], ...]:
    """Those of an answer that is the entry."""
    return (
        *entry_headers(manifest),
        (b"content-length", str(manifest.size_bytes).encode()),
        (b"content-type", ENTRY_CONTENT_TYPE.encode()),
    )


def _is_known(if_none_match: str | None, digest: Digest) -> bool:
    if if_none_match is None:
        return False
    tags = {tag.strip().removeprefix("W/") for tag in if_none_match.split(",")}
    return "*" in tags or etag(digest) in tags


def read_at_hand(blob: OpenObject, offset: int, size_bytes: int) -> bytes | bytearray | memoryview | None:
    """What the page cache has of the next piece, or None if it takes a wait to know."""
    if blob.descriptor is None:
        return None
    buffer = bytearray(size_bytes)  # a new one each time: the transport may still hold the last
    try:
        count = os.preadv(blob.descriptor, [buffer], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _WOULD_BLOCK:
            return None
        raise
    return buffer if count == size_bytes else memoryview(buffer)[:count]
