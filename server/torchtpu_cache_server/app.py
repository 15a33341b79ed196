"""The ASGI application: trust first, then the blob path by hand, and everything else through FastAPI."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from torchtpu_cache_core.errors import CacheError
from torchtpu_cache_server.edge import ClientGone, Edge
from torchtpu_cache_server.entries_asgi import EntryHandler
from torchtpu_cache_server.health import Health
from torchtpu_cache_server.metrics import Metrics
from torchtpu_cache_server.openapi import distribution_version, openapi_of
from torchtpu_cache_server.problems import ProblemKind, Refusal, refusal_of, send_refusal
from torchtpu_cache_server.routers.entries import create_entries_router
from torchtpu_cache_server.routers.status import create_status_router
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.trust import LoopbackTrust

Asgi = Callable[[Any, Any, Any], Any]

_ENTRY: Final = re.compile(r"/v1/([^/]+)/entries/([^/]+)")
_LOOKUP: Final = re.compile(r"/v1/[^/]+/lookup")
_BLOB_METHODS: Final = frozenset({"GET", "HEAD", "PUT"})
_READING_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_ROUTES: Final = (
    ("entry", _ENTRY),
    ("lookup", _LOOKUP),
    ("entries", re.compile(r"/v1/[^/]+/entries")),
    ("stats", re.compile(r"/v1/[^/]+/stats")),
    ("status", re.compile(r"/(healthz|readyz|metrics|docs|openapi\.json)?")),
)


def create_app(
    service: Service,
    *,
    threads: Executor | None = None,
    metrics: Metrics | None = None,
    trust: LoopbackTrust | None = None,
    idle_seconds: float = 30.0,
) -> Dispatcher:
    """The application over a service, which stays the caller's.

    Args:
        threads: where blocking work runs; sixteen of its own where none are given.
        trust: who may ask; by default the rules for a service without authentication.
        idle_seconds: how long a peer may neither send nor take a byte.
    """
    edge = Edge(
        service=service,
        threads=threads or ThreadPoolExecutor(max_workers=16, thread_name_prefix="service"),
        metrics=metrics or Metrics(),
        health=Health(service.check, service.clock),
        idle_seconds=idle_seconds,
    )
    return Dispatcher(edge, trust or LoopbackTrust(), _create_fastapi(edge))


def _create_fastapi(edge: Edge) -> FastAPI:
    app = FastAPI(
        title="torchtpu-cache",
        description="Compiled XLA programs by key.",
        version=distribution_version(),
        docs_url=None,  # FastAPI's page loads scripts from elsewhere; ours does not
        redoc_url=None,
        redirect_slashes=False,
    )
    document = openapi_of(app)
    app.openapi = document  # type: ignore[method-assign]
    app.include_router(create_entries_router(edge))
    app.include_router(create_status_router(edge, document))

    async def answer(request: Request, error: Exception) -> Response:
        refusal = _refusal_of(edge, error)
        status, headers, body = refusal.answer()
        response = Response(body, status)
        response.raw_headers = headers
        return response

    for kind in (CacheError, Refusal, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, answer)
    return app


def _refusal_of(edge: Edge, error: Exception) -> Refusal:
    match error:
        case Refusal():
            return error
        case CacheError():
            edge.note_failure(error)
            return refusal_of(error)
        case HTTPException(status_code=404):
            return Refusal(404, ProblemKind.NO_SUCH_PATH, "nothing lives under this path; /docs lists what does")
        case HTTPException(status_code=405, headers=headers):
            return Refusal(405, ProblemKind.METHOD, "this path has other methods", allow=(headers or {}).get("Allow"))
        case HTTPException(status_code=status):
            return Refusal(status, ProblemKind.INVALID, "the request makes no sense")
        case RequestValidationError():
            faults = error.errors()
            where = ".".join(str(part) for part in faults[0]["loc"])[:100] if faults else "the request"
            return Refusal(
                422, ProblemKind.INVALID, f"{where} has no sense: {faults[0]['msg'] if faults else ''}"[:300]
            )
    return edge.unexpected(error)


class Dispatcher:
    """Routes a request, answers every error with a problem, and counts."""

    def __init__(self, edge: Edge, trust: LoopbackTrust, api: Asgi) -> None:
        self.edge = edge
        self._trust = trust
        self._api = api
        self._entries = EntryHandler(edge)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return  # no lifespan of its own, no websockets
        started = time.perf_counter()
        sent = _Sent(send)
        try:
            await self._handle(scope, receive, sent)
        except Refusal as refusal:
            await self._refuse(sent, refusal)
        except ClientGone:
            sent.status = sent.status or 499
        except (TimeoutError, asyncio.CancelledError):
            # A peer that takes no byte, or the end of the service: the connection breaks, and the client sees it.
            sent.status = sent.status or 499
            raise
        except Exception as error:
            unexpected = self.edge.unexpected(error)
            if sent.status:
                raise  # in the middle of an answer: only a broken connection is honest
            await self._refuse(sent, unexpected)
        finally:
            self.edge.metrics.request(
                scope["method"], _route(scope["path"]), sent.status or 500, time.perf_counter() - started
            )

    async def _refuse(self, sent: _Sent, refusal: Refusal) -> None:
        if not sent.status:
            await send_refusal(sent, refusal)

    async def _handle(self, scope: Any, receive: Any, send: _Sent) -> None:
        edge, method, path = self.edge, scope["method"], scope["path"]
        self._trust.check(scope)
        if method not in _READING_METHODS and not (method == "POST" and _LOOKUP.fullmatch(path)):
            await edge.blocking(self._trust.check_writer, scope)
        match = _ENTRY.fullmatch(path)
        if match and method in _BLOB_METHODS:
            await self._entries(scope, receive, send, *match.groups())
            return
        if match and method != "DELETE":
            raise Refusal(405, ProblemKind.METHOD, "an entry has other methods", allow="DELETE, GET, HEAD, PUT")
        # Also where there is none: a peer that is gone by now may have been taken for the next owner of its port.
        body = await edge.small_body(receive)
        try:
            await self._api(scope, _Replay(body, receive), send)
        except Exception:
            # FastAPI raises again what it has answered already, for a server's log; it is in ours.
            if not send.status:
                raise


class _Sent:
    """Passes on what is sent, and remembers the status."""

    __slots__ = ("_send", "status")

    def __init__(self, send: Any) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class _Replay:
    """Gives a body that was read already, then whatever follows."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Any:
        body, self._body = self._body, None
        if body is None:
            return await self._receive()
        return {"type": "http.request", "body": body, "more_body": False}


def _route(path: str) -> str:
    return next((name for name, grammar in _ROUTES if grammar.fullmatch(path)), "other")
