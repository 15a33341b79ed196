"""A proxy on loopback that stands before a real service and makes one thing go wrong at a time.

    with FaultProxy(upstream_port) as proxy:
        proxy.fault = Fault(status=503, retry_after="7")
        ...
        proxy.fault = None      # all passes again

It reads a request, asks the upstream, and bends the answer; or answers itself, before or after the body.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Final, Self

from support.rawserver import RawServer, answer, read_request, received, reset

_PIECE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong; the fields that are set act together, in the order below.

    Args:
        methods: only for these; empty for all.
        over_bytes: only for requests with a larger body than this.
        hang: says nothing, and holds the connection until the proxy closes.
        flip_request_at: inverts a bit of this byte of the request's body.
        reset_request_at: resets the connection once so many bytes of the body have come.
        delay_seconds: before anything is answered.
        status, body, content_type, retry_after: the proxy's own answer instead of the upstream's.
        before_body: that answer comes before the body has been read, and the connection is closed after it.
        paths: asks the upstream for another path than the client did.
        headers: replaces headers of the upstream's answer, by lower-case name; None removes one.
        flip_at: inverts a bit of this byte of the answer's body.
        garbage: sent instead of the whole answer.
        cut_at: closes the connection after so many bytes of the answer, head included.
        reset_at: as `cut_at`, with a reset.
        drip_seconds: the answer goes out byte by byte, with this pause after each.
    """

    methods: frozenset[str] = frozenset()
    over_bytes: int = -1
    hang: bool = False
    flip_request_at: int | None = None
    reset_request_at: int | None = None
    delay_seconds: float = 0.0
    status: int | None = None
    body: bytes = b"<html>not what you asked for</html>"
    content_type: str = "text/html"
    retry_after: str | None = None
    before_body: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str | None] = field(default_factory=dict)
    flip_at: int | None = None
    garbage: bytes | None = None
    cut_at: int | None = None
    reset_at: int | None = None
    drip_seconds: float = 0.0


class FaultProxy:
    """Listens on a port of its own; `requests` lists (method, path, bytes of body received) of all it has seen."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._closing = threading.Event()
        self._server = RawServer(self._serve)
        self.port: int = self._server.port
        self.fault: Fault | None = None
        self.requests: list[tuple[str, str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def refuse(self) -> None:
        """Stops listening, and closes all connections, as a service does that died."""
        self._closing.set()
        self._server.close()

    def listen(self) -> None:
        """Listens again on the same port."""
        self._closing.clear()
        self._server = RawServer(self._serve, self.port)

    def close(self) -> None:
        self.refuse()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, client: socket.socket) -> None:
        upstream: socket.socket | None = None
        try:
            while True:
                line, headers, rest = read_request(client, body=False)
                fault = self._fault_for(line, headers)
                body = self._body(client, headers, rest, fault, line)
                if fault.hang:
                    self._closing.wait(60)
                    return
                if fault.delay_seconds:
                    self._closing.wait(fault.delay_seconds)
                if fault.status is not None:
                    extra = {} if fault.retry_after is None else {"Retry_After": fault.retry_after}
                    raw = answer(fault.status, fault.body, fault.content_type, **extra)
                    raw = raw if not line.startswith("HEAD") else raw[: raw.index(b"\r\n\r\n") + 4]
                else:
                    upstream = upstream or socket.create_connection(("127.0.0.1", self._upstream_port), 5)
                    raw = _bent(_asked(upstream, line, headers, body, fault), fault)
                if not self._deliver(client, raw, fault) or (fault.before_body and body is None):
                    return
        finally:
            if upstream is not None:
                upstream.close()

    def _fault_for(self, line: str, headers: dict[str, str]) -> Fault:
        fault = self.fault
        large_enough = fault is not None and int(headers.get("content-length", 0)) > fault.over_bytes
        if fault is None or not large_enough or (fault.methods and line.split(" ")[0] not in fault.methods):
            return Fault()
        return fault

    def _body(
        self, client: socket.socket, headers: dict[str, str], rest: bytes, fault: Fault, line: str
    ) -> bytes | None:
        """The request's body; None where the fault is to leave it unread."""
        method, path, _ = line.split(" ")
        length = int(headers.get("content-length", 0))
        if fault.before_body and length:
            self.requests.append((method, path, len(rest)))
            return None
        if headers.get("expect") == "100-continue":
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray(rest)
        stop_at = length if fault.reset_request_at is None else min(length, fault.reset_request_at)
        while len(body) < stop_at:
            body += received(client)
        self.requests.append((method, path, len(body)))
        if fault.reset_request_at is not None:
            reset(client)
            raise ConnectionResetError
        if fault.flip_request_at is not None and body:
            body[fault.flip_request_at % len(body)] ^= 1
        return bytes(body)

    def _deliver(self, client: socket.socket, raw: bytes, fault: Fault) -> bool:
        """Sends the answer; False where the connection is to be closed now."""
        if fault.garbage is not None:
            client.sendall(fault.garbage)
            return False
        if fault.drip_seconds:
            for i in range(len(raw)):
                client.sendall(raw[i : i + 1])
                if self._closing.wait(fault.drip_seconds):
                    return False
        elif fault.cut_at is not None or fault.reset_at is not None:
            client.sendall(raw[: fault.cut_at if fault.cut_at is not None else fault.reset_at])
            if fault.reset_at is not None:
                time.sleep(0.05)  # a reset may overtake bytes that the kernel has not delivered yet
                reset(client)
            return False
        else:
            client.sendall(raw)
        return True


def _asked(
    upstream: socket.socket, line: str, headers: dict[str, str], body: bytes | None, fault: Fault
) -> tuple[str, dict[str, str], bytes]:
    """Status line, headers and body of the upstream's answer."""
    method, path, version = line.split(" ")
    lines = [f"{method} {fault.paths.get(path, path)} {version}"]
    lines += [f"{name}: {value}" for name, value in headers.items() if name != "expect"]
    upstream.sendall("\r\n".join((*lines, "", "")).encode("latin-1") + (body or b""))
    status, answered, rest = read_request(upstream, body=False)
    length = 0 if method == "HEAD" else int(answered.get("content-length", 0))
    data = bytearray(rest)
    while len(data) < length:
        data += received(upstream)
    return status, answered, bytes(data)


def _bent(answered: tuple[str, dict[str, str], bytes], fault: Fault) -> bytes:
    status, headers, body = answered
    kept = {name: value for name, value in (headers | fault.headers).items() if value is not None}
    if fault.flip_at is not None and body:
        at = fault.flip_at % len(body)
        body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    return "\r\n".join((status, *(f"{n}: {v}" for n, v in kept.items()), "", "")).encode("latin-1") + body
