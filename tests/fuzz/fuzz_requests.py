"""Fuzzes the service's reader of HTTP requests: what a peer sends is answered in HTTP, or ends the connection.

No socket: bytes go straight into the protocol, piece by piece, and what it says is looked at.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

import atheris
import uvicorn
from uvicorn.server import ServerState

with atheris.instrument_imports():
    from torchtpu_cache_server.protocol import MAX_HEAD_BYTES, BoundedProtocol

_ANSWER = re.compile(rb"HTTP/1\.1 (?:200|400|408|431) ")
_PIECES = [
    b"",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nabcde",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"5\r\nabcde\r\n",
    b"0\r\n\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"GET / HTTP/1.1\r\n",
    b"X: " + b"y" * (MAX_HEAD_BYTES // 2) + b"\r\n",
]


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.said = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed, "a write to a connection that was closed"
        self.said += data

    def write_eof(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


async def _app(scope: Any, receive: Any, send: Any) -> None:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    transport, errors = _Transport(), []
    _LOOP.set_exception_handler(lambda _, context: errors.append(context))
    state = ServerState()
    protocol = BoundedProtocol(_CONFIG, state, {}, _LOOP)
    protocol.connection_made(transport)
    while provider.remaining_bytes() and not transport.closed:
        piece = _PIECES[provider.ConsumeIntInRange(0, len(_PIECES) - 1)]
        piece += provider.ConsumeBytes(provider.ConsumeIntInRange(0, 60))
        if piece:
            protocol.data_received(piece)
        if provider.ConsumeBool():
            _LOOP.run_until_complete(asyncio.sleep(0))
    _LOOP.run_until_complete(_settle(state))
    assert not transport.said or _ANSWER.match(transport.said), bytes(transport.said[:200])
    protocol.connection_lost(None)
    _LOOP.run_until_complete(_settle(state))
    assert not state.tasks, "an answer is awaited for ever"
    assert errors == []


async def _settle(state: ServerState) -> None:
    for _ in range(100):
        if not state.tasks:
            return
        await asyncio.sleep(0)


if __name__ == "__main__":
    _LOOP = asyncio.new_event_loop()
    asyncio.set_event_loop(_LOOP)
    _CONFIG = uvicorn.Config(_app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
    _CONFIG.load()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
