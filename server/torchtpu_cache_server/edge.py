"""What every handler of HTTP needs: the service, the threads that may block, counters, deadlines."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from torchtpu_cache_core.errors import CacheError, FailureKind, StoreError
from torchtpu_cache_server.health import Health
from torchtpu_cache_server.metrics import Metrics
from torchtpu_cache_server.problems import ProblemKind, Refusal, is_failure
from torchtpu_cache_server.service import Service

_log = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C", bound="Closeable | None")

MAX_SMALL_BODY_BYTES: Final = 256 << 10
"""Of a request that is no upload: a look-up of 1,000 keys has under 100 KB."""


class Closeable(Protocol):
    def close(self) -> None: ...


class ClientGone(Exception):
    """The client went away in the middle; there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What the handlers share. Its methods belong to the event loop.

    Args:
        idle_seconds: how long a peer may neither send nor take a byte; there is no deadline for the whole.
    """

    service: Service
    threads: Executor
    metrics: Metrics
    health: Health
    idle_seconds: float = 30.0

    async def blocking(self, call: Callable[..., T], *args: object) -> T:
        """Runs what may wait for the disk in a thread. A cancelled caller does not stop it."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *args)

    async def holding(self, call: Callable[..., C], *args: object) -> C:
        """As `blocking`, for what has to be closed: a caller that is cancelled meanwhile still leaves nothing open."""
        job = self.threads.submit(call, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            job.add_done_callback(_close_result)
            raise

    def unexpected(self, error: Exception) -> Refusal:
        """Logs an error that nobody foresaw, and gives the answer that tells nothing but where to look."""
        request_id = secrets.token_hex(8)
        _log.error("request %s failed", request_id, exc_info=error)
        self.health.failed()
        detail = f"the service failed; its log says why under {request_id}"
        return Refusal(500, ProblemKind.INTERNAL, detail, closes=True)

    def note_failure(self, error: CacheError, *, uploading: bool = False) -> None:
        """Counts an error if it is the service's own, and logs it, with its cause, within bounds.

        What the operating system refused is one line: it names the file, and where in the code tells no more.
        """
        if is_failure(error, uploading=uploading):
            self.metrics.failure(error.kind if isinstance(error, StoreError) else FailureKind.SERVER_ERROR)
            if self.health.failed():
                if isinstance(error.__cause__, OSError):
                    _log.error("a request failed: %s (%s)", error, error.__cause__)
                else:
                    _log.error("a request failed: %s", error, exc_info=error)

    async def body_piece(self, receive: Callable[[], Any], idle_seconds: float | None = None) -> tuple[bytes, bool]:
        """The next piece of the request's body, and whether more follows.

        Args:
            idle_seconds: how long it may take, where not as long as usual.

        Raises:
            Refusal: 408, nothing came for too long.
            ClientGone: the client did.
        """
        try:
            async with asyncio.timeout(self.idle_seconds if idle_seconds is None else idle_seconds):
                message = await receive()
        except TimeoutError:
            raise Refusal(
                408, FailureKind.TIMEOUT, f"no byte of the body came for {self.idle_seconds:g} s", closes=True
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    async def small_body(self, receive: Callable[[], Any]) -> bytes:
        """A whole body of at most 256 KiB; Refusal (413, 408) or ClientGone otherwise."""
        body, more = bytearray(), True
        while more:
            piece, more = await self.body_piece(receive)
            body += piece
            if len(body) > MAX_SMALL_BODY_BYTES:
                raise Refusal(
                    413,
                    FailureKind.TOO_LARGE,
                    f"a request of this kind has at most {MAX_SMALL_BODY_BYTES:,} bytes",
                    limit_bytes=MAX_SMALL_BODY_BYTES,
                    closes=True,
                )
        return bytes(body)


def _close_result(job: Future[C]) -> None:
    if not job.cancelled() and job.exception() is None and (result := job.result()) is not None:
        result.close()


def content_length(value: str | None) -> int | None:
    """The number in a Content-Length header; Refusal (400) unless it is plain digits."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise Refusal(400, ProblemKind.INVALID, "Content-Length is no number", closes=True)
    return int(value)
