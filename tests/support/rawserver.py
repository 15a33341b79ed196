"""A TCP server on loopback whose every word a test writes itself: for peers that no real service would be."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

Script = Callable[[socket.socket], None]


class RawServer:
    """Runs `script` in a thread of its own for each connection, and closes the connection after it.

    What the script raises as OSError is the client's doing and ends it quietly; any other error is kept and raised
    when the server closes.

    Args:
        script: talks on the accepted socket.
        port: 0 for a free one.
    """

    def __init__(self, script: Script, port: int = 0) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", port), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self.ended = 0
        """Connections that are closed again on this side."""
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()  # guards _live, _threads and the counts
        self._live: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
            with self._lock:
                self.connections += 1
                self._live.add(connection)
                self._threads.append(thread)
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._script(connection)
        except OSError:
            pass
        except BaseException as error:
            self._errors.append(error)
        finally:
            with self._lock:
                self._live.discard(connection)
            connection.close()
            with self._lock:
                self.ended += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join(5)
        with self._lock:
            live, threads = tuple(self._live), tuple(self._threads)
        for connection in live:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)
        if self._errors:
            raise self._errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_request(connection: socket.socket, *, body: bool = True) -> tuple[str, dict[str, str], bytes]:
    """Request line, headers by lower-case name, and the body; ConnectionError at the end of the stream."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, rest = data.partition(b"\r\n\r\n")
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    if not body:
        return line, headers, rest
    if headers.get("expect") == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    while len(rest) < int(headers.get("content-length", 0)):
        rest += received(connection)
    return line, headers, rest


def requests(connection: socket.socket) -> Iterator[tuple[str, dict[str, str], bytes]]:
    """All requests of a connection, until the client closes it."""
    with contextlib.suppress(ConnectionError):
        while True:
            yield read_request(connection)


def received(connection: socket.socket) -> bytes:
    """At least one byte; ConnectionResetError at the end of the stream."""
    piece = connection.recv(1 << 20)
    if not piece:
        raise ConnectionResetError
    return piece


def answer(status: int, body: bytes = b"", content_type: str = "text/plain", **headers: str) -> bytes:
    """The bytes of an answer with its length; `_` in header names stands for `-`."""
    lines = [
        f"HTTP/1.1 {status} Whatever",
        f"Content-Length: {len(body)}",
        f"Content-Type: {content_type}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def reset(connection: socket.socket) -> None:
    """Closes with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
