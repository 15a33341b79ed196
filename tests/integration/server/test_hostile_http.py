"""Peers that cut, lie, dawdle, flood and climb: each gets its refusal, and the service lives on with nothing left."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Iterator

import pytest

from support.served import Served, path_of, read_all
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import Digest
from torchtpu_cache_core.testing.entries import Corruption, corruptions, entry_for, key_for, rival_of

_KEY = key_for("hostile")


@pytest.fixture(autouse=True)
def _unharmed(served: Served) -> Iterator[None]:
    """After every test the service answers, and no half of anything lies about."""
    yield
    assert served.ask("GET", "/readyz").status == 200
    deadline = time.monotonic() + 10
    while leftovers := list(served.data_dir.rglob(".writing-*")):
        assert time.monotonic() < deadline, leftovers
        time.sleep(0.02)


def _head(entry: Entry, *lines: str, length: int | None = None, path: str = "") -> bytes:
    length = entry.size_bytes if length is None else length
    head = [
        f"PUT {path or path_of(entry)} HTTP/1.1",
        "Host: localhost",
        f"Content-Digest: {wire.content_digest(entry.digest)}",
        *([f"Content-Length: {length}"] if length >= 0 else []),
        *lines,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n"


def _problem(raw: bytes) -> tuple[int, str, dict[str, object]]:
    """Status and kind of the first answer in what came back."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert b"application/problem+json" in head
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    problem = json.loads(body[:length])
    assert problem["status"] == status
    return status, problem["kind"], problem


def test_a_body_that_is_cut_leaves_nothing(served: Served) -> None:
    entry = entry_for("cut", size_bytes=1 << 20)
    for sent in (0, 10, 5000, entry.size_bytes - 1):
        connection = served.connect()
        connection.sendall(_head(entry) + bytes(entry.buffer[:sent]))
        time.sleep(0.05)
        connection.close()
    assert served.get(entry).kind == "not_found"
    assert served.put(entry).status == 201


@pytest.mark.parametrize("corruption", list(corruptions(entry_for("victim"))), ids=lambda c: c.name)
def test_what_is_no_entry_is_never_published(served: Served, corruption: Corruption) -> None:
    data = corruption.data
    digest = wire.content_digest(Digest(hashlib.sha256(data).hexdigest()))
    path = f"/v1/hostile-{int(corruption.at_unpack)}/entries/{key_for('victim')}"
    answer = served.ask("PUT", path, data, Content_Digest=digest)
    if corruption.at_unpack:
        # The payload is opened by readers only, within bounds; the service never unpacks.
        assert answer.status in (201, 409)
        return
    assert answer.status == 422
    assert answer.kind == corruption.reason
    assert served.ask("GET", path).kind == "not_found"


def test_another_digest_than_announced(served: Served) -> None:
    entry, other = entry_for("announced"), entry_for("other")
    answer = served.put(entry, Content_Digest=wire.content_digest(other.digest))
    assert (answer.status, answer.kind) == (422, "digest")
    assert served.get(entry).status == 404


def test_another_key_than_asked_for(served: Served) -> None:
    entry = entry_for("sent to a wrong key")
    answer = served.ask(
        "PUT", f"/v1/default/entries/{_KEY}", bytes(entry.buffer), Content_Digest=wire.content_digest(entry.digest)
    )
    assert (answer.status, answer.kind) == (422, "key")


def test_lengths_that_lie(served: Served) -> None:
    entry = entry_for("lying length", size_bytes=50_000)
    whole = bytes(entry.buffer)
    long = served.raw(_head(entry, "Connection: close", length=len(whole) + 10) + whole + b"0123456789")
    assert _problem(long)[:2] == (422, "length")
    short = served.raw(_head(entry, "Connection: close", length=len(whole) - 10) + whole[:-10])
    assert _problem(short)[:2] == (422, "short")
    assert served.get(entry).status == 404


@pytest.mark.parametrize(
    ("lines", "length", "status"),
    [
        (["Transfer-Encoding: chunked"], -1, 411),
        ([], -1, 411),
        (["Transfer-Encoding: chunked"], 10, 400),
        (["Content-Length: 5"], 10, 400),
        (["Content-Encoding: gzip"], 10, 415),
        (["Content-Digest: sha-256=:AAAA:"], 10, 400),
    ],
)
def test_lengths_and_codings_that_are_refused(served: Served, lines: list[str], length: int, status: int) -> None:
    raw = served.raw(_head(entry_for("refused"), *lines, "Connection: close", length=length))
    assert _problem(raw)[0] == status


@pytest.mark.parametrize("value", ["", "nonsense", "sha-256=::", "sha-256=:AAAA:", "sha-512=:AAAA:", "sha-256=xyz"])
def test_a_put_needs_its_digest(served: Served, value: str) -> None:
    entry = entry_for("no digest")
    answer = served.ask("PUT", path_of(entry), bytes(entry.buffer), Content_Digest=value)
    assert (answer.status, answer.kind) == (400, "invalid")
    assert served.ask("PUT", path_of(entry), bytes(entry.buffer)).status == 400


@pytest.mark.parametrize("length", ["-1", "1e3", "0x10", "9" * 30, "1 2", "+5", ""])
def test_lengths_that_are_no_numbers(served: Served, length: str) -> None:
    head = f"PUT /v1/default/entries/{_KEY} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    assert _problem(served.raw(head.encode()))[0] in (400, 411)


def test_too_large_is_said_before_the_body(served: Served) -> None:
    entry = entry_for("too large")
    raw = served.raw(_head(entry, "Expect: 100-continue", "Connection: close", length=3 << 30))
    status, kind, problem = _problem(raw)
    assert (status, kind, problem["limit_bytes"]) == (413, "too_large", 2 << 30)
    assert b"100 Continue" not in raw


def test_an_early_answer_reaches_who_sends_on(served: Served) -> None:
    """A conflict is known before the body; a client that sends all of it must still be able to read the answer."""
    entry = entry_for("early", size_bytes=4 << 20)
    served.put(entry)
    rival = entry_for("early", executable=bytes(range(256)) * 20_000)
    assert rival.digest != entry.digest
    for _ in range(5):
        answer = served.put(rival)
        assert (answer.status, answer.json["digest"]) == (409, entry.digest)


def test_expect_continue(served: Served) -> None:
    entry = entry_for("expect", size_bytes=300_000)
    connection = served.connect()
    connection.sendall(_head(entry, "Expect: 100-continue", "Connection: close"))
    assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n")
    connection.sendall(bytes(entry.buffer))
    assert b" 201 " in read_all(connection)
    refused = served.raw(_head(rival_of(entry), "Expect: 100-continue"))
    assert refused.startswith(b"HTTP/1.1 409 ")
    assert b"100 Continue" not in refused


def test_a_slow_body_arrives(served: Served) -> None:
    entry = entry_for("slow")
    connection = served.connect()
    connection.sendall(_head(entry, "Connection: close"))
    raw = bytes(entry.buffer)
    for start in range(0, len(raw), 100):
        connection.sendall(raw[start : start + 100])
        time.sleep(0.01)
    assert b" 201 " in read_all(connection)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/default/entries/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/default/entries/..%2f..%2fetc",
        "/v1/%2e%2e/entries/" + _KEY,
        "/v1/../../../etc/passwd",
        "/v1/default/entries/../../../../etc/passwd",
        "/v1/default/entries/" + _KEY + "%00",
        "/v1/default/entries/" + _KEY + "%0a",
        "/v1/default%0a/entries/" + _KEY,
        "/v1/default/entries/" + _KEY.upper(),
        "/v1/default/entries/" + _KEY + "/1",
        "/v1/default/entries/" + _KEY + "\\..",
        "//v1/default/entries/" + _KEY,
        "/v1/d%C3%A9fault/entries/" + _KEY,
        "/v1/%FF/entries/" + _KEY,
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_paths_that_climb(served: Served, method: str, path: str) -> None:
    before = sorted(served.data_dir.parent.rglob("*"))
    entry = entry_for("hostile")
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {entry.size_bytes}\r\nConnection: close\r\n"
        f"Content-Digest: {wire.content_digest(entry.digest)}\r\n\r\n"
    )
    status, kind, _ = _problem(served.raw(head.encode() + bytes(entry.buffer)))
    assert (status, kind) in {(400, "invalid"), (404, "no_such_path"), (405, "method")}
    assert sorted(served.data_dir.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "data",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/0.9\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_our_http(served: Served, data: bytes) -> None:
    assert _problem(served.raw(data))[0] in (400, 404, 405)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Flood: 1\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * 200_000,
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Flood: 1\r\n" * 200_000,
    ],
)
def test_heads_without_end(served: Served, data: bytes) -> None:
    with socket.create_connection((served.host, served.port), timeout=30) as connection:
        try:
            connection.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            return  # refused in the middle, which is as good
        received = read_all(connection)
    # A reset may overtake the answer where not everything was read.
    assert received == b"" or _problem(received)[0] in (400, 431)


def test_a_flood_of_heads_holds_no_memory(served: Served) -> None:
    before = served.resident_bytes()[0]
    for _ in range(20):
        with socket.create_connection((served.host, served.port), timeout=30) as connection:
            try:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
                for _ in range(100):
                    connection.sendall(b"a" * 100_000)
            except (ConnectionResetError, BrokenPipeError):
                pass
            else:
                pytest.fail("ten megabytes of one header were taken")
    assert served.resident_bytes()[0] < before + 30_000_000


def test_a_flood_of_pipelined_requests_holds_no_memory(served: Served) -> None:
    before = served.resident_bytes()[0]
    flood = f"GET {path_of(entry_for('absent'))} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 20_000
    for _ in range(10):
        connection = served.connect()
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(flood)
        read_all(connection)  # until the service closes
    assert served.resident_bytes()[0] < before + 30_000_000


@pytest.mark.parametrize("asked", ["POST /v1/default/lookup", f"GET /v1/default/entries/{_KEY}"])
def test_a_trailer_without_end_holds_no_memory(served: Served, asked: str) -> None:
    before = served.resident_bytes()[0]
    connection = served.connect()
    connection.sendall(f"{asked} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    connection.sendall(b"2\r\n{}\r\n0\r\nX-Long: ")
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        for _ in range(100):
            connection.sendall(b"a" * 1_000_000)
    assert served.resident_bytes()[0] < before + 30_000_000


def test_a_trailer_is_no_header(served: Served) -> None:
    head = b"POST /v1/default/lookup HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
    body = b'\r\nb\r\n{"keys":[]}\r\n0\r\nHost: localhost\r\n\r\n'
    assert _problem(served.raw(head + body))[0] == 400
    assert served.raw(head + b"Host: localhost\r\n" + body).startswith(b"HTTP/1.1 200 ")


def test_a_small_body_that_is_large(served: Served) -> None:
    head = b"POST /v1/default/lookup HTTP/1.1\r\nHost: localhost\r\n"
    raw = served.raw(head + b"Content-Length: 300000\r\n\r\n" + b" " * 300_000)
    assert _problem(raw)[:2] == (413, "too_large")
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    raw = served.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 5)
    assert _problem(raw)[:2] == (413, "too_large")


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    entry = entry_for("pipelined")
    get = f"GET {path_of(entry)} HTTP/1.1\r\nHost: localhost\r\n".encode()
    raw = served.raw(
        get + b"\r\n" + _head(entry) + bytes(entry.buffer) + get + b"\r\n" + get + b"Connection: close\r\n\r\n"
    )
    statuses = [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [404, 201, 200, 200]


def test_readers_who_leave_or_stall_harm_nobody(served: Served) -> None:
    entry = entry_for("large read", size_bytes=8 << 20)
    served.put(entry)
    request = f"GET {path_of(entry)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    stalled = [served.connect() for _ in range(30)]
    for connection in stalled:
        connection.sendall(request)
    for _ in range(30):
        with socket.create_connection((served.host, served.port)) as connection:
            connection.sendall(request)
            connection.recv(100)
    started = time.monotonic()
    assert served.get(entry).body == bytes(entry.buffer)
    assert time.monotonic() - started < 10
    for connection in stalled:
        connection.close()
