"""Sends a case of hostile HTTP to a service, and judges what the service says to it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from support.httpfuzzer import Case
from support.rawserver import reset
from torchtpu_cache_core import wire

SILENCE_SECONDS: Final = 0.2
"""A service that says nothing for so long waits for more, or is busy; where an answer is owed it gets longer."""

OWED_SECONDS: Final = 25.0
"""Less than the 30 s after which the service closes what stands still."""

_MAX_HEARD_BYTES: Final = 64 << 20
_MAX_HEAD_BYTES: Final = 64 << 10
_STATUS: Final = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) ")


@dataclass(slots=True)
class Heard:
    """What came back.

    Args:
        statuses: of the final answers, in order.
        fault: what the service did that it must not; empty where nothing.
    """

    statuses: list[int] = field(default_factory=list)
    fault: str = ""


def converse(port: int, case: Case) -> Heard:
    """Plays a case. The service must answer what is owed, speak HTTP, and close when we do."""
    with socket.create_connection(("127.0.0.1", port), timeout=OWED_SECONDS) as connection:
        with contextlib.suppress(ConnectionError, TimeoutError):  # it may refuse in the middle of what we send
            for piece in case.pieces:
                connection.sendall(piece)
        if case.end == "reset":
            reset(connection)
            return Heard()
        if case.end == "close":
            return Heard()
        answers = _Answers(case)
        ended = _listen(connection, case, answers)
        answers.finish()
        heard = _judged(answers, case, ended)
        if not ended and not heard.fault:
            heard.fault = _after_our_end(connection, case)
    return heard


def _listen(connection: socket.socket, case: Case, answers: _Answers) -> bool:
    """Takes all that comes until what is owed is there, or silence; whether the service ended it."""
    deadline = time.monotonic() + OWED_SECONDS
    while answers.size_bytes < _MAX_HEARD_BYTES:
        if case.plain and len(answers.whole) >= len(case.plain):
            return False
        connection.settimeout(max(0.01, deadline - time.monotonic()) if case.plain else SILENCE_SECONDS)
        try:
            piece = connection.recv(1 << 18)
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        if not piece:
            return True
        answers.feed(piece)
    return False


def _after_our_end(connection: socket.socket, case: Case) -> str:
    """Half-closes; the service must follow, and to plain requests say nothing more."""
    connection.settimeout(OWED_SECONDS)
    try:
        connection.shutdown(socket.SHUT_WR)
        while more := connection.recv(1 << 18):
            if case.plain:
                return f"more came than was asked for: {more[:200]!r}"
    except TimeoutError:
        return f"the connection was still open {OWED_SECONDS:g} s after our end of it was closed"
    except OSError:
        pass
    return ""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes


def _judged(answers: _Answers, case: Case, ended: bool) -> Heard:
    heard = Heard([answer.status for answer in answers.whole])
    if answers.rest and not ended:
        heard.fault = f"what followed {heard.statuses} is no whole answer: {bytes(answers.rest[:200])!r}"
    elif len(answers.whole) < len(case.plain):
        how = "the connection was closed" if ended else f"nothing more came in {OWED_SECONDS:g} s"
        heard.fault = f"{len(case.plain)} answers were owed, {len(answers.whole)} came, and {how}"
    for answer in answers.whole:
        heard.fault = heard.fault or _wrong_with(answer)
    return heard


class _Answers:
    """Final answers out of a stream, as far as they are whole. Where nobody knows what was asked, HEAD is guessed."""

    def __init__(self, case: Case) -> None:
        self.whole: list[_Answer] = []
        self.rest = bytearray()
        self.size_bytes = 0
        self._plain = case.plain

    def feed(self, piece: bytes) -> None:
        self.rest += piece
        self.size_bytes += len(piece)
        while (end := self._next(at_end=False)) > 0:
            del self.rest[:end]

    def finish(self) -> None:
        """Nothing more comes: a head without its body is one to HEAD."""
        while (end := self._next(at_end=True)) > 0:
            del self.rest[:end]

    def _next(self, *, at_end: bool) -> int:
        """Takes the answer that the rest begins with, and gives its length; 0 while it is not whole."""
        blank = self.rest.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
        status = _STATUS.match(self.rest)
        if blank < 0 or status is None:
            return 0
        start, number = blank + 4, int(status[1])
        if number < 200:
            return start
        lines = [line.partition(b":") for line in bytes(self.rest[:blank]).split(b"\r\n")[1:]]
        headers = {name.decode("latin-1").lower(): value.strip().decode("latin-1") for name, _, value in lines}
        end = start + int(headers.get("content-length", 0))
        if number in (204, 304) or self._is_bare(start, at_end=at_end):
            end = start
        if len(self.rest) < end:
            return 0
        self.whole.append(_Answer(number, headers, bytes(self.rest[start:end])))
        return end

    def _is_bare(self, start: int, *, at_end: bool) -> bool:
        """Whether no body follows, whatever the head says."""
        if len(self.whole) < len(self._plain):
            return self._plain[len(self.whole)] == "HEAD"
        return self.rest.startswith(b"HTTP/1.1 ", start) or (at_end and len(self.rest) == start)


def _wrong_with(answer: _Answer) -> str:
    if answer.status >= 500:
        return f"status {answer.status}"
    if answer.status >= 400:
        if answer.headers.get("content-type") != wire.PROBLEM_CONTENT_TYPE:
            return f"status {answer.status} without a problem"
        if answer.body:
            with contextlib.suppress(ValueError):
                problem = json.loads(answer.body)
                if (
                    problem["status"] == answer.status
                    and problem["kind"] == answer.headers[wire.PROBLEM_HEADER.lower()]
                ):
                    return ""
            return f"status {answer.status} with another problem: {answer.body[:200]!r}"
        return ""
    is_entry = answer.headers.get("content-type") == wire.ENTRY_CONTENT_TYPE and answer.body
    if is_entry and answer.headers.get("etag") != f'"{hashlib.sha256(answer.body).hexdigest()}"':
        return "an entry that is not the one its ETag names"
    return ""
