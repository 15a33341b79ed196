"""Peers at a service's address that are no such service: each answers a request in a way that a client must survive."""

from __future__ import annotations

import contextlib
import gzip
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from support.rawserver import Script, answer, read_request
from torchtpu_cache_core import wire

_PIECE = b"X-Long: " + b"a" * 4096 + b"\r\n"


def _says(raw: Callable[[], bytes], *, then_holds: bool = False) -> Script:
    """Reads a request, says something, and closes or holds the connection."""

    def script(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(raw())
        if then_holds:
            connection.settimeout(30)
            connection.recv(1)

    return script


def _endless(head: bytes, piece: bytes) -> Script:
    def script(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return script


def garbage(seed: int) -> Script:
    """Random bytes, other ones for each connection."""
    source = random.Random(seed)
    return _says(lambda: source.randbytes(source.randrange(1, 5000)))


def page(status: int, body: bytes = b"<html><body>Sign in to continue</body></html>", **headers: str) -> Script:
    """What a proxy or a login page answers."""
    return _says(lambda: answer(status, body, "text/html; charset=utf-8", **headers))


def gzipped() -> Script:
    """An answer as ours, in a coding that nobody asked for."""
    return _says(lambda: answer(200, gzip.compress(b"x" * 5000), wire.ENTRY_CONTENT_TYPE, Content_Encoding="gzip"))


OTHER_PROTOCOLS = {
    "ssh": b"SSH-2.0-OpenSSH_9.2\r\n",
    "tls": b"\x15\x03\x03\x00\x02\x02\x46",
    "http2": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00" + bytes(18),
    "http09": b"<html>no head at all</html>",
    "icy": b"ICY 200 OK\r\n\r\n",
    "redis": b"-ERR unknown command 'GET'\r\n",
    "status": b"HTTP/1.1 9999 What\r\n\r\n",
    "version": b"HTTP/7.3 200 OK\r\nContent-Length: 0\r\n\r\n",
    "nothing": b"",
    "header": b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    "bare": b"HTTP/1.1 200 OK\r\n\r\n",
}
"""First words of what may listen on the port instead, and of heads that are none."""


def other_protocol() -> Script:
    """One after another of `OTHER_PROTOCOLS`."""
    turn = iter(())  # type: Iterator[bytes]

    def raw() -> bytes:
        nonlocal turn
        word = next(turn, None)
        if word is None:
            turn = iter(OTHER_PROTOCOLS.values())
            word = next(turn)
        return word

    return _says(raw)


def wrong_length(kind: str) -> Script:
    """A 200 as our service gives it, whose Content-Length is not that of its body."""
    lengths = {
        "longer": "Content-Length: 5000",
        "shorter": "Content-Length: 10",
        "negative": "Content-Length: -1",
        "huge": "Content-Length: 999999999999999999",
        "two": "Content-Length: 100\r\nContent-Length: 200",
        "none": "X-Nothing: here",
        "chunked": "Transfer-Encoding: chunked",
    }
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {wire.ENTRY_CONTENT_TYPE}\r\n{lengths[kind]}\r\n\r\n"
    return _says(lambda: head.encode() + b"z" * 100)


def endless_head() -> Script:
    """A head without end, as fast as the client takes it."""
    return _endless(b"HTTP/1.1 200 OK\r\n", _PIECE)


def endless_interim() -> Script:
    """`100 Continue` for ever."""
    return _endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def never() -> Script:
    """Takes the request and never answers."""
    return _says(bytes, then_holds=True)


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """A listener on `port` whose queue is full, so that the kernel drops further SYNs like a firewall does."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", port))
        yield


@contextmanager
def deaf(port: int) -> Iterator[None]:
    """A listener on `port` that never accepts: the kernel connects, and nobody is there."""
    with socket.create_server(("127.0.0.1", port), backlog=512):
        yield


def body_stops() -> Script:
    """Announces an entry, sends a part of it, and then nothing more."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {wire.ENTRY_CONTENT_TYPE}\r\nContent-Length: 50000\r\n\r\n"
    return _says(lambda: head.encode() + bytes(1000), then_holds=True)
