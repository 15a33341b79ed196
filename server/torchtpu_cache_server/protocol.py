"""uvicorn's HTTP/1.1 protocol, with bounds on what is no body: its size, its lines, and the time it may take.

uvicorn bounds none of them with httptools, so that one endless header or trailer, a heap of pipelined requests, or the
rest of a body that never comes would hold memory or a connection for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from torchtpu_cache_server.problems import ProblemKind, Refusal

MAX_HEAD_BYTES: Final = 64 << 10
MAX_HEADERS: Final = 100
HEAD_SECONDS: Final = 30.0
MAX_PIPELINED: Final = 32
"""Requests that wait for the answer of one before them; all that arrive in one packet are parsed at once."""


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431 and 408 with a problem and closes; 400 likewise, where uvicorn answers in plain text."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lines_bytes = 0  # since a request or the last byte of a body: of its head, its trailers
        self._headers_seen = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._timer is None:
            self._start_timer()
        self._lines_bytes += len(data)
        super().data_received(data)
        if self._lines_bytes > MAX_HEAD_BYTES:
            self._refuse(431, ProblemKind.INVALID, f"the head of a request has at most {MAX_HEAD_BYTES:,} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        if self._headers_seen > MAX_HEADERS:
            raise ValueError("too many headers")  # ends the parser, which reports a bad request
        if self._in_head:  # a trailer is no header: it may come after the headers were judged
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._lines_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._headers_seen = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._lines_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many requests at once")

    def on_message_complete(self) -> None:
        self._in_head = True
        self._lines_bytes = 0
        self._stop_timer()
        if self.cycle.response_complete:
            self._start_timer()  # uvicorn's ended when this rest of a body arrived
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer()  # nobody waits for the rest of the body any more

    def send_400_response(self, msg: str) -> None:
        status, what = 400, "the request is not HTTP/1.1 as this service reads it"
        if self._headers_seen > MAX_HEADERS:
            status, what = 431, f"a request has at most {MAX_HEADERS} headers"
        self._refuse(status, ProblemKind.INVALID, what)

    def _start_timer(self) -> None:
        # A connection that is kept alive between requests has uvicorn's own timer.
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._is_late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_late(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(408, ProblemKind.INVALID, f"the head of the request took longer than {HEAD_SECONDS:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, kind: str, detail: str) -> None:
        transport: Any = self.transport
        if transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            # Only between answers: bytes in the middle of one would be read as part of it.
            code, headers, body = Refusal(status, kind, detail, closes=True).answer()
            lines = [f"HTTP/1.1 {code} Refused\r\n".encode()]
            lines += [name + b": " + value + b"\r\n" for name, value in headers]
            transport.write(b"".join([*lines, b"\r\n", body]))
        transport.close()
