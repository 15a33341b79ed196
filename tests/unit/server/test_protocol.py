"""Connections on which nothing more happens: each ends by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from torchtpu_cache_server import protocol
from torchtpu_cache_server.protocol import BoundedProtocol

_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body"})


async def _talk(*pieces: bytes) -> bytes:
    """Sends one piece after another's answer, and gives all that came until the service closed."""
    config = uvicorn.Config(_answer, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(3.0):  # uvicorn's own timer takes 5 s
            received = await reader.read()
        writer.close()
    return received


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET / HTTP/1.1\r\n",),
        (b"\r\n",),
        (_GET, b"x"),
        (_GET, b"0123456789"),
        (_GET + b"0123456789" + _GET, b"x"),
        (_GET, b"0123456789" + _GET, b"x"),
    ],
)
def test_a_peer_that_owes_something_is_not_awaited_for_ever(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    received = asyncio.run(_talk(*pieces))
    answers = b"".join(pieces).count(_GET)
    assert received.count(b" 200 ") == answers
    assert received.count(b" 408 ") == received.count(b"HTTP/1.1") - answers
