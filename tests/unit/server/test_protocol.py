"""Connections on which nothing more happens end by themselves, and what cannot be read gets an answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from torchtpu_cache_server import protocol
from torchtpu_cache_server.protocol import BoundedProtocol

_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n"


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body."""
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body"})


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, takes its time, and answers with the body's length."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    await asyncio.sleep(0.02)
    body = b"%d" % length
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


class _Heard(BoundedProtocol):
    """Counts what has arrived and was dealt with."""

    heard_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.heard_bytes += len(data)


async def _talk(*pieces: bytes, app: Callable[[Any, Any, Any], Any] = _answer) -> bytes:
    """Sends one piece after another's answer, and gives all that came until the service closed."""
    asking = 0

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def asks() -> Any:
            nonlocal asking
            asking += 1
            try:
                return await receive()
            finally:
                asking -= 1

        await app(scope, asks, send)

    config = uvicorn.Config(watched, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    heard: list[_Heard] = []

    def connected() -> _Heard:
        heard.append(_Heard(config, state, {}))
        return heard[-1]

    def is_waiting(sent_bytes: int) -> bool:
        """Whether the service has done all that it can with what was sent, or reads no more."""
        if not heard or heard[0].heard_bytes < sent_bytes:
            return bool(heard) and heard[0].transport is not None and heard[0].transport.is_closing()
        cycle = heard[0].cycle
        return not heard[0].pipeline and (cycle is None or cycle.response_complete or asking > 0)

    server = await loop.create_server(connected, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        sent_bytes = 0
        for piece in pieces[:-1]:
            writer.write(piece)
            sent_bytes += len(piece)
            async with asyncio.timeout(3.0):
                while not is_waiting(sent_bytes):  # noqa: ASYNC110 - what is awaited tells nobody
                    await asyncio.sleep(0.01)
        writer.write(pieces[-1])
        async with asyncio.timeout(3.0):  # uvicorn's own timer takes 5 s
            received = await reader.read()
        writer.close()
    return received


def _answers(received: bytes) -> list[int]:
    """The statuses, in order; every one that is no 200 must be a problem, and the last of its connection."""
    found = re.split(rb"(?=HTTP/1\.1 [0-9]{3} )", received)[1:]
    statuses = [int(answer.split()[1]) for answer in found]
    for status, answer in zip(statuses, found, strict=True):
        if status != 200:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"application/problem+json" in head
            assert b"connection: close" in head
            assert json.loads(body)["status"] == status
    return statuses


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


_HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
_WHOLE = _HEAD + b"Content-Length: 3\r\n\r\nabc"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size_bytes", [64 << 10, 100_000, 250_000])
@pytest.mark.parametrize("headers", [1, 50])
def test_a_head_over_its_limit_is_refused_even_if_it_comes_whole(size_bytes: int, headers: int) -> None:
    line = b"X-Long: " + b"a" * (size_bytes // headers) + b"\r\n"
    assert _answers(asyncio.run(_talk(_HEAD + line * headers + b"\r\n", app=_echo))) == [431]


def test_a_head_just_under_its_limit_is_served() -> None:
    head = _HEAD + b"X-Long: " + b"a" * ((64 << 10) - 100) + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    assert _answers(asyncio.run(_talk(head, app=_echo))) == [200]


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        ((b"nonsense\r\n\r\n",), [400]),
        ((_CHUNKED + b"zz\r\n",), [400]),
        ((_CHUNKED, b"5\r\nabcde\r\nnot a length\r\n"), [400]),
        ((_WHOLE + b"nonsense\r\n\r\n",), [200, 400]),
        ((_WHOLE, b"nonsense\r\n\r\n"), [200, 400]),
        ((_WHOLE * 3 + b"nonsense\r\n\r\n",), [200] * 3 + [400]),
        ((_WHOLE * 3 + _CHUNKED + b"zz\r\n",), [200] * 3 + [400]),
        ((_WHOLE * 100,), [200] * 33 + [400]),
        ((_WHOLE + _HEAD + b"X: y\r\n" * 101,), [200, 431]),
        ((_WHOLE + _HEAD + b"X: " + b"y" * 70_000, b"y" * 70_000), [200, 431]),
    ],
)
def test_what_cannot_be_read_is_answered_after_what_is_owed(pieces: tuple[bytes, ...], statuses: list[int]) -> None:
    assert _answers(asyncio.run(_talk(*pieces, app=_echo))) == statuses


def test_an_answer_that_has_begun_is_cut_and_not_followed_by_a_refusal() -> None:
    async def begins(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"10")]})
        await send({"type": "http.response.body", "body": b"12345", "more_body": True})
        await receive()

    received = asyncio.run(_talk(_CHUNKED, b"zz\r\n", app=begins))
    assert received.endswith(b"\r\n\r\n12345")
    assert received.count(b"HTTP/1.1") == 1


def test_a_refusal_reaches_a_peer_that_goes_on_sending() -> None:
    pieces = [_HEAD + b"X-Long: "] + [b"a" * 50_000] * 6
    assert _answers(asyncio.run(_talk(*pieces, app=_echo))) == [431]


def test_an_offer_of_another_protocol_is_passed_over_and_ends_the_connection() -> None:
    offer = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    get = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
    assert _answers(asyncio.run(_talk(get, app=_echo))) == [200]
    # The parser would take the body for the other protocol, and not for a body.
    assert _answers(asyncio.run(_talk(_HEAD + offer + b"Content-Length: 3\r\n\r\nabc", app=_echo))) == [400]


def test_an_answer_to_a_connection_that_broke_is_no_error() -> None:
    """Of pipelined requests, uvicorn tells only the last one that nobody waits any more."""
    raised: list[BaseException] = []

    async def talk() -> None:
        started, gone = asyncio.Event(), asyncio.Event()

        async def late(scope: Any, receive: Any, send: Any) -> None:
            started.set()
            await gone.wait()
            await asyncio.sleep(0.02)  # a write that failed has closed the handle by now
            try:
                await _answer(scope, receive, send)
            except BaseException as error:
                raised.append(error)

        config = uvicorn.Config(late, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        async with await loop.create_server(lambda: BoundedProtocol(config, state, {}), "127.0.0.1", 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4)
            await started.wait()
            writer.transport.abort()
            gone.set()
            async with asyncio.timeout(5.0):
                while state.tasks:
                    await asyncio.wait(set(state.tasks))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())
    assert raised == []
