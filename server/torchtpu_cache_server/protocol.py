"""uvicorn's HTTP/1.1 protocol, with bounds on what is no body: its size, its lines, and the time it may take.

uvicorn bounds none of them with httptools, so that one endless header or trailer, a heap of pipelined requests, or the
rest of a body that never comes would hold memory or a connection for ever.

What cannot be read ends the connection, with a problem as the last answer: after the answers that are owed to the
requests before it, and in the place of the one whose body is broken, unless that has begun.
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

LINGER_SECONDS: Final = 1.0
LINGER_BYTES: Final = 1 << 20
"""How long, and how much, is still read and let go behind a refusal: closing on unread bytes would reset the
connection, and the peer could lose the answer."""

_BODY_HEADERS: Final = frozenset({b"content-length", b"transfer-encoding"})
_TOO_LONG: Final = f"the head of a request has at most {MAX_HEAD_BYTES:,} bytes"


class _Writer:
    """What an answer does with its transport. uvloop raises at a write to a connection that broke, and of pipelined
    requests uvicorn tells only the last one that it did; that is no fault of the others."""

    __slots__ = ("_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self.is_closing():
            self._transport.write(data)


class BoundedProtocol(HttpToolsProtocol):
    """Answers 431, 408 and 400 with a problem, where uvicorn answers in plain text or not at all."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer: Any = _Writer(transport)
        self._lines_bytes = 0  # since a request or the last byte of a body: of its head, its trailers
        self._head_bytes = 0  # of those, what is parsed
        self._headers_seen = 0
        self._in_head = True
        self._timer: asyncio.TimerHandle | None = None
        self._fault: tuple[int, str] | None = None
        self._refusal: Refusal | None = None
        self._lingered_bytes = 0
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            self._linger(len(data))
            return
        if self._in_head and self._timer is None:
            self._start_timer()
        self._lines_bytes += len(data)
        super().data_received(data)
        if self._lines_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LONG)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        if self._headers_seen > MAX_HEADERS:
            self._end_parser(431, f"a request has at most {MAX_HEADERS} headers")
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._in_head:  # a trailer is no header: it may come after the headers were judged
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._lines_bytes = 0
        super().on_body(body)

    def on_message_begin(self) -> None:
        self._headers_seen = self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        parser: Any = self.parser
        offers_another = parser.should_upgrade()
        if offers_another and any(name in _BODY_HEADERS for name, _ in self.headers):
            self._end_parser(400, "this service speaks HTTP/1.1 only; send a body without an Upgrade header")
        self._in_head = False
        self._lines_bytes = self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()
        self.cycle.transport = self._writer
        if offers_another:
            self.cycle.keep_alive = False  # the parser takes what follows for another protocol
        if len(self.pipeline) > MAX_PIPELINED:
            self._end_parser(400, f"at most {MAX_PIPELINED} requests may wait for the answer of one before them")

    def on_message_complete(self) -> None:
        self._in_head = True
        self._lines_bytes = 0
        self._stop_timer()
        if self.cycle.response_complete:
            self._start_timer()  # uvicorn's ended when this rest of a body arrived
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._refusal is not None and len(self.pipeline) <= (not self._in_head):
            self.pipeline.clear()  # of the one that is left the body is broken
            self._send_refusal(self._refusal)
            return
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and not self.transport.is_closing():
            self._start_timer()  # nobody waits for the rest of the body any more

    def send_400_response(self, msg: str) -> None:
        self._refuse(*(self._fault or (400, "the request is not HTTP/1.1 as this service reads it")))

    def _count(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._end_parser(431, _TOO_LONG)

    def _end_parser(self, status: int, detail: str) -> None:
        """Raises what makes the parser report a bad request."""
        self._fault = status, detail
        raise ValueError(detail)

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
            self._refuse(408, f"the head of the request took longer than {HEAD_SECONDS:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, detail: str) -> None:
        """Reads no further request. `_in_head` tells that all those begun are whole."""
        if self._refusal is not None or self.transport.is_closing():
            return
        self._stop_timer()
        self._refusal = Refusal(status, ProblemKind.INVALID, detail, closes=True)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self._send_refusal(self._refusal)
        elif self.pipeline or self._in_head:
            self.flow.pause_reading()  # answers are owed first; `on_response_complete` goes on
        elif cycle.response_started:
            self.transport.close()  # bytes in the middle of an answer would be read as part of it
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._send_refusal(self._refusal)

    def _send_refusal(self, refusal: Refusal) -> None:
        transport: Any = self.transport
        if transport.is_closing():
            return
        code, headers, body = refusal.answer()
        lines = [f"HTTP/1.1 {code} Refused\r\n".encode()]
        lines += [name + b": " + value + b"\r\n" for name, value in headers]
        transport.write(b"".join([*lines, b"\r\n", body]))
        transport.write_eof()
        self.flow.resume_reading()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_SECONDS, transport.close)

    def _linger(self, size_bytes: int) -> None:
        self._lingered_bytes += size_bytes
        if self._lingered_bytes > LINGER_BYTES:
            self.transport.close()
