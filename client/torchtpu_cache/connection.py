"""One HTTP/1.1 connection to a peer that may be slow or hostile: bounded time, bounded memory.

The standard library's `http.client` has no overall deadline, no cap on the bytes of a head, no `Expect: 100-continue`,
and does not see an answer that comes before the body is sent. Each would have to be built past its API, and importing
it costs a job 30 ms. What this client needs of HTTP is small: one request, one status line, headers, and a body of a
declared length. Anything else (chunked bodies, other encodings, redirects) is an answer that its callers refuse.
"""

from __future__ import annotations

import io
import re
import select
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.endpoint import Endpoint
from torchtpu_cache_core.errors import ConfigError, FailureKind, StoreRefused

MAX_HEAD_BYTES: Final = 64 << 10
"""Of all heads of one answer, interim ones included; a manifest is at most 6 KiB of it."""

_BUFFER_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 256 << 10
_EXPECT_FROM_BYTES: Final = 256 << 10
"""Bodies from this size on wait for the service's word, so that a refusal costs no transfer."""

_EXPECT_SECONDS: Final = 1.0
"""How long to wait for that word; a proxy may not know it (RFC 9110, section 10.1.1)."""

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?\r?\n")
_HEADER_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*\r?\n")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an exchange may take, phase by phase. Every wait is bounded by one of these.

    Args:
        connect_seconds: to connect, over all addresses.
        answer_seconds: from the sent request to the whole head of its answer, and between two pieces of its body; also
            for a TLS handshake, and for a free connection where all are in use. Who asks waits.
        idle_seconds: between two pieces of a body that is sent, and from a sent PUT, which the service brings to disk,
            to its answer. Nobody waits for an upload.
        min_bytes_per_second: a body may take as long as between two pieces, and what it takes at this rate. What has
            moved counts, not what was announced, so that a peer that drips holds nobody for long.
    """

    connect_seconds: float = 0.05
    answer_seconds: float = 2.0
    idle_seconds: float = 10.0
    min_bytes_per_second: float = 1 << 20

    def __post_init__(self) -> None:
        for name in ("connect_seconds", "answer_seconds", "idle_seconds", "min_bytes_per_second"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a positive number")


@dataclass(frozen=True, slots=True)
class Question:
    """One request. All that this client asks is safe to ask twice.

    Args:
        path: with its query, below the endpoint's own path; percent-encoded.
        headers: beside Host, User-Agent, Accept-Encoding, Content-Length and Expect.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | memoryview | None = None


class _Head(NamedTuple):
    minor_version: int
    status: int
    headers: dict[str, str]


class Answer:
    """The head of an answer, and its body as far as it has a declared length.

    Attributes:
        headers: by lower-case name; values of one name are joined by a comma, so that a doubled length is no length.
        length: of the body in bytes; None where it is not declared, or coded in any way.
    """

    def __init__(self, connection: Connection, head: _Head, *, bare: bool) -> None:
        headers = head.headers
        self.status = head.status
        self.headers = headers
        self._connection = connection
        self._keeps_open = head.minor_version == 1 and "close" not in headers.get("connection", "").lower()
        self.length: int | None = None
        if bare:
            self.length = 0
        elif "transfer-encoding" not in headers and headers.get("content-encoding", "identity") == "identity":
            declared = headers.get("content-length", "")
            self.length = int(declared) if _LENGTH.fullmatch(declared) else None
        self._left = self.length

    @property
    def reusable(self) -> bool:
        """Whether another question may follow on this connection."""
        return self._keeps_open and self._left == 0 and self._connection.sent_all

    def readinto(self, view: memoryview) -> None:
        """Fills `view` from the body, which must have that much left."""
        assert self._left is not None
        assert len(view) <= self._left
        if self._connection.reader.readinto(view) != len(view):
            raise ConnectionResetError("the connection was closed inside a body")
        self._left -= len(view)

    def read(self, limit_bytes: int) -> bytes | None:
        """The whole body, or None where it has no declared length of at most `limit_bytes`."""
        if self.length is None or self.length > limit_bytes:
            return None
        body = bytearray(self.length)
        self.readinto(memoryview(body))
        return bytes(body)


class Stream(io.RawIOBase):
    """A connected socket that waits no longer than its deadline and reads no more than its room.

    `readinto` gives None instead of waiting while `waits` is False.
    """

    def __init__(
        self, sock: socket.socket, clock: Clock, would_block: tuple[type[OSError], ...], send_flags: int
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._clock = clock
        self._would_block = would_block
        self._send_flags = send_flags
        self._poller = select.poll()
        self._poller.register(sock)
        self.deadline = 0.0
        self.idle_seconds = 0.0
        self.seconds_per_byte = 0.0
        self.room_bytes = 0
        self.received_bytes = 0
        self.ended = False
        self.waits = True

    def allow(self, seconds: float, idle_seconds: float, seconds_per_byte: float = 0.0) -> None:
        """Starts a phase: how long it may take, how much more for each byte that moves, and between two pieces."""
        self.deadline = self._clock.monotonic() + seconds
        self.idle_seconds = idle_seconds
        self.seconds_per_byte = seconds_per_byte

    def wait(self, events: int) -> int:
        left = min(self.idle_seconds, self.deadline - self._clock.monotonic())
        self._poller.modify(self._socket, events)
        ready = self._poller.poll(left * 1000) if left > 0 else []
        if not ready:
            raise TimeoutError
        return ready[0][1]

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        view = memoryview(buffer)[: self.room_bytes]
        if not view:
            raise StoreRefused("the remote's answer has a head without end", FailureKind.PROTOCOL)
        while True:
            try:
                count = self._socket.recv_into(view)
            except self._would_block:
                if not self.waits:
                    return None
                self.wait(select.POLLIN)
                continue
            self.ended = count == 0
            self.room_bytes -= count
            self.received_bytes += count
            self.deadline += count * self.seconds_per_byte
            return count

    def send(self, view: memoryview) -> int:
        try:
            count = self._socket.send(view, self._send_flags)
        except self._would_block:
            return 0
        self.deadline += count * self.seconds_per_byte
        return count

    def abandon(self) -> None:
        """Closes this process's descriptor and nothing else; for a child that was forked in the midst of anything."""
        self._socket.close()

    def close(self) -> None:
        self._socket.close()
        super().close()


class Connection:
    """One connection: asks one question at a time."""

    def __init__(self, stream: Stream, endpoint: Endpoint, patience: Patience) -> None:
        self.stream = stream
        self.reader = io.BufferedReader(stream, _BUFFER_BYTES)
        self.idle_since = 0.0
        self.sent_all = True
        self._early_head: _Head | None = None
        self._endpoint = endpoint
        self._patience = patience

    def close(self) -> None:
        self.reader.close()

    @property
    def untouched(self) -> bool:
        """Whether not one byte came since the question was asked."""
        return self.stream.received_bytes == 0

    def quiet(self) -> bool:
        """Whether the connection is open and holds nothing that nobody asked for."""
        self.stream.room_bytes = 1
        try:
            return not self._peek() and not self.stream.ended
        except OSError:
            return False

    def _peek(self) -> bytes:
        """What has arrived, without waiting; at least one byte where there is any."""
        self.stream.waits = False
        try:
            return self.reader.peek(1)
        finally:
            self.stream.waits = True

    def ask(self, question: Question) -> Answer:
        """Sends the question and reads the head of its answer."""
        stream, patience, body = self.stream, self._patience, question.body
        stream.received_bytes = 0
        stream.room_bytes = MAX_HEAD_BYTES
        size = 0 if body is None else len(body)
        waits_for_word = size >= _EXPECT_FROM_BYTES
        asked = self._head_of(question, waits_for_word)
        self._allow_body(patience.idle_seconds)
        self.sent_all = False
        self._early_head = None
        try:
            if body is None or size == 0:
                self.sent_all = self._send(asked)
            elif not waits_for_word:
                self.sent_all = self._send(asked + bytes(body))
            elif self._send(asked) and not self._refused_before_body():
                self.sent_all = self._send(body)
        except ConnectionError:
            # The peer may have said why before it closed: that answer is still there to be read.
            if not self._peek():
                raise
        stream.allow(
            patience.idle_seconds if question.method == "PUT" else patience.answer_seconds, patience.idle_seconds
        )
        head = self._final_head()
        answer = Answer(self, head, bare=question.method == "HEAD" or head.status in (204, 304))
        self._allow_body(patience.answer_seconds)
        stream.room_bytes = (answer.length or 0) + _BUFFER_BYTES
        return answer

    def _allow_body(self, seconds: float) -> None:
        self.stream.allow(seconds, seconds, 1 / self._patience.min_bytes_per_second)

    def _head_of(self, question: Question, waits_for_word: bool) -> bytes:
        lines = [
            f"{question.method} {self._endpoint.path}{question.path} HTTP/1.1",
            f"Host: {self._endpoint.authority}",
            "User-Agent: torchtpu-cache",
            "Accept-Encoding: identity",
            *(f"{name}: {value}" for name, value in question.headers.items()),
        ]
        if question.body is not None:
            lines.append(f"Content-Length: {len(question.body)}")
        if waits_for_word:
            lines.append("Expect: 100-continue")
        return "\r\n".join((*lines, "", "")).encode("ascii")

    def _send(self, data: bytes | memoryview) -> bool:
        """Sends all of `data`; False, and not all is sent, once a final answer has come."""
        view = memoryview(data)
        while view:
            sent = self.stream.send(view[:_PIECE_BYTES])
            view = view[sent:]
            if view:
                events = self.stream.wait(select.POLLIN | select.POLLOUT)
                if events & ~select.POLLOUT and self._final_answer_came():
                    return False
        return True

    def _refused_before_body(self) -> bool:
        idle_seconds = self.stream.idle_seconds
        self.stream.idle_seconds = min(idle_seconds, _EXPECT_SECONDS)
        try:
            self.stream.wait(select.POLLIN)
        except TimeoutError:
            return False
        finally:
            self.stream.idle_seconds = idle_seconds
        return self._final_answer_came()

    def _final_answer_came(self) -> bool:
        """Reads what has arrived: interim heads are passed over, a final one is kept for `ask`."""
        while self._peek():
            head = self._read_head()
            if head.status >= 200:
                self._early_head = head
                return True
        return self.stream.ended

    def _final_head(self) -> _Head:
        head = self._early_head
        while head is None or head.status < 200:
            head = self._read_head()
        return head

    def _read_head(self) -> _Head:
        line = self.reader.readline()
        if not line:
            raise ConnectionResetError("the connection was closed before an answer")
        match = _STATUS_LINE.fullmatch(line)
        if match is None:
            raise _no_http()
        headers: dict[str, str] = {}
        while (line := self.reader.readline()) not in (b"\r\n", b"\n"):
            if not line.endswith(b"\n"):
                raise ConnectionResetError("the connection was closed inside a head")
            header = _HEADER_LINE.fullmatch(line)
            if header is None:
                raise _no_http()
            name, value = header[1].decode("ascii").lower(), header[2].decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        return _Head(int(match[1]), int(match[2]), headers)


def _no_http() -> StoreRefused:
    return StoreRefused("what listens at the remote's address does not speak HTTP", FailureKind.PROTOCOL)
