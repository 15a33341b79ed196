"""Peers that are slow, dead or hostile: every call ends in time, in little memory, with a StoreError."""

from __future__ import annotations

import random
import select
import socket
import time
import tracemalloc

import pytest

from support.rawserver import RawServer, Script, answer, read_request, reset
from support.replies import hit, manifest_of, miss, problem
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, FailureKind, StoreError, StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for

ENTRY = entry_for("the entry", size_bytes=20_000)


def patient(url: str, answer_seconds: float = 0.3, idle_seconds: float = 0.3) -> RemoteStore:
    return RemoteStore(url, DEFAULT_NAMESPACE, answer_seconds=answer_seconds, idle_seconds=idle_seconds)


def endless(connection: socket.socket, piece: bytes) -> None:
    while True:
        connection.sendall(piece)


def test_what_cannot_be_the_answer_is_not_fetched_to_its_end() -> None:
    """The head of another key's entry, or of one of another length, and then a body that goes on for ever."""
    asked, other = (entry_for(name, size_bytes=1 << 20) for name in ("asked", "another"))
    declared = (1 << 30) + other.size_bytes

    fetched = [0]

    def script(entry: Entry) -> Script:
        raw = hit(entry).replace(b"Content-Length: %d" % entry.size_bytes, b"Content-Length: %d" % declared)

        def send(connection: socket.socket) -> None:
            read_request(connection)
            fetched[0] = 0
            connection.sendall(raw)
            while True:
                connection.sendall(bytes(65536))
                fetched[0] += 65536

        return send

    for entry, reason in ((other, CorruptReason.KEY), (asked, CorruptReason.LENGTH)):
        with RawServer(script(entry)) as server, patient(server.url) as store:
            with pytest.raises(CorruptEntry) as caught:
                store.get(asked.key)
            assert caught.value.reason is reason
            assert fetched[0] < 64 << 20


# ---- hostile heads and bodies ----------------------------------------------------------------------------------

ENTRY_HEAD = (
    f"HTTP/1.1 200 OK\r\nContent-Type: {wire.ENTRY_CONTENT_TYPE}\r\nETag: {wire.etag(ENTRY.digest)}\r\n"
    f"{wire.MANIFEST_HEADER}: {manifest_of(ENTRY).to_header()}\r\n"
)


def hold(connection: socket.socket) -> None:
    """Says nothing until the client is gone."""
    select.select([connection], [], [], 5)


def drip(connection: socket.socket, data: bytes, seconds: float) -> None:
    for i in range(len(data)):
        connection.sendall(data[i : i + 1])
        time.sleep(seconds)


HOSTILE: dict[str, tuple[Script, set[FailureKind]]] = {
    "says nothing": (hold, {FailureKind.TIMEOUT}),
    "closes at once": (lambda c: None, {FailureKind.RESET}),
    "resets": (reset, {FailureKind.RESET}),
    "half a status line": (lambda c: c.sendall(b"HTTP/1.1 2"), {FailureKind.PROTOCOL, FailureKind.RESET}),
    "half a head": (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-"), {FailureKind.RESET}),
    "garbage": (lambda c: c.sendall(random.Random(1).randbytes(100_000)), {FailureKind.PROTOCOL}),
    "garbage lines": (lambda c: c.sendall(b"\x00\xff\n" * 100), {FailureKind.PROTOCOL}),
    "HTTP/0.9": (lambda c: c.sendall(b"<html>hello</html>\n"), {FailureKind.PROTOCOL}),
    "HTTP/2": (lambda c: c.sendall(b"HTTP/2 200 OK\r\n\r\n"), {FailureKind.PROTOCOL}),
    "ssh": (lambda c: c.sendall(b"SSH-2.0-OpenSSH_9\r\n"), {FailureKind.PROTOCOL}),
    "status 42": (lambda c: c.sendall(b"HTTP/1.1 042 OK\r\n\r\n"), {FailureKind.PROTOCOL}),
    "a header without colon": (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nnope\r\n\r\n"), {FailureKind.PROTOCOL}),
    "a folded header": (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n"), {FailureKind.PROTOCOL}),
    "a header with NUL": (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nA: \0\r\n\r\n"), {FailureKind.PROTOCOL}),
    "endless status line": (lambda c: endless(c, b"A" * 65536), {FailureKind.PROTOCOL}),
    "endless header line": (
        lambda c: (c.sendall(b"HTTP/1.1 200 OK\r\nA: "), endless(c, b"b" * 65536)),
        {FailureKind.PROTOCOL},
    ),
    "endless headers": (
        lambda c: (c.sendall(b"HTTP/1.1 200 OK\r\n"), endless(c, b"A: b\r\n" * 1000)),
        {FailureKind.PROTOCOL},
    ),
    "endless 100 Continue": (lambda c: endless(c, b"HTTP/1.1 100 Continue\r\n\r\n" * 100), {FailureKind.PROTOCOL}),
    "a dripped head": (lambda c: drip(c, miss(), 0.05), {FailureKind.TIMEOUT}),
    "a body that stops": (
        lambda c: (c.sendall(hit(ENTRY)[:-1000]), hold(c)),
        {FailureKind.TIMEOUT},
    ),
    "a body cut short": (lambda c: c.sendall(hit(ENTRY)[:-1000]), {FailureKind.RESET}),
    "a dripped body": (lambda c: (c.sendall(hit(ENTRY)[:-1000]), drip(c, bytes(1000), 0.05)), {FailureKind.TIMEOUT}),
    "a claimed gigabyte, dripped": (
        lambda c: (c.sendall(f"{ENTRY_HEAD}Content-Length: {1 << 30}\r\n\r\n".encode()), drip(c, bytes(1000), 0.05)),
        {FailureKind.TIMEOUT},
    ),
    "a length of 10^15": (
        lambda c: c.sendall(f"{ENTRY_HEAD}Content-Length: {10**15}\r\n\r\n".encode()),
        {FailureKind.TOO_LARGE},
    ),
    "a length of 10^5000": (
        lambda c: c.sendall(f"{ENTRY_HEAD}Content-Length: {'9' * 5000}\r\n\r\n".encode()),
        {FailureKind.PROTOCOL},
    ),
    "a claimed gigabyte": (
        lambda c: c.sendall(f"{ENTRY_HEAD}Content-Length: {1 << 30}\r\n\r\n".encode() + bytes(ENTRY.buffer)),
        {FailureKind.RESET, FailureKind.CORRUPT},
    ),
    "an endless body": (
        lambda c: (c.sendall(ENTRY_HEAD.encode() + b"\r\n"), endless(c, bytes(65536))),
        {FailureKind.PROTOCOL},
    ),
    "an endless problem": (
        lambda c: (
            c.sendall(b"HTTP/1.1 404 No\r\nContent-Type: application/problem+json\r\n\r\n"),
            endless(c, b" " * 65536),
        ),
        {FailureKind.PROTOCOL},
    ),
    "an endless chunked problem": (
        lambda c: (
            c.sendall(
                b"HTTP/1.1 500 No\r\nContent-Type: application/problem+json\r\nTransfer-Encoding: chunked\r\n\r\n"
            ),
            endless(c, b"1\r\n \r\n" * 1000),
        ),
        {FailureKind.SERVER_ERROR},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_peer_costs_bounded_time_and_memory(name: str) -> None:
    script, kinds = HOSTILE[name]

    def after_the_request(connection: socket.socket) -> None:
        read_request(connection)
        script(connection)

    with RawServer(after_the_request) as server, patient(server.url) as store:
        tracemalloc.start()
        started = time.monotonic()
        with pytest.raises(StoreError) as caught:
            store.get(ENTRY.key)
        seconds, (_, peak) = time.monotonic() - started, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert caught.value.kind in kinds
    assert seconds < 1.5
    assert peak < 4 << 20


def test_a_claimed_gigabyte_is_not_made_resident() -> None:
    import resource

    script, _ = HOSTILE["a claimed gigabyte"]
    with RawServer(lambda c: (read_request(c), script(c))) as server, patient(server.url) as store:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(StoreError):
            store.get(ENTRY.key)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_random_answers_raise_store_errors_only() -> None:
    chance = random.Random(20261130)
    well = [
        hit(ENTRY),
        miss(),
        problem(413, "too_large", limit_bytes=5),
        answer(200, b'{"found":{}}', "application/json"),
    ]

    def bent(raw: bytes) -> bytes:
        data = bytearray(raw)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(min(len(data), 800))
            match chance.randrange(4):
                case 0:
                    data[at] = chance.randrange(256)
                case 1:
                    del data[at : at + chance.randrange(40)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randrange(20))
                case _:
                    data[at:at] = data[: chance.randrange(400)]
        return bytes(data)

    def script(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(bent(chance.choice(well)))

    outcomes = {"hit": 0, "miss": 0, "error": 0}
    with RawServer(script) as server, patient(server.url) as store:
        for i in range(400):
            calls = (lambda: store.get(ENTRY.key), lambda: store.lookup([ENTRY.key]), lambda: store.put(ENTRY))
            try:
                got = calls[i % 3]()
            except StoreError:
                outcomes["error"] += 1
            else:
                outcomes["hit" if got else "miss"] += 1
                if i % 3 == 0 and got is not None:
                    assert got.entry.digest == ENTRY.digest
    assert outcomes["error"] > 200


# ---- dead ports ------------------------------------------------------------------------------------------------


def test_a_refused_connection_is_told_at_once() -> None:
    with RawServer(lambda c: None) as server:
        url = server.url
    with patient(url) as store:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.get(ENTRY.key)
    assert caught.value.kind is FailureKind.CONNECT
    assert time.monotonic() - started < 0.5


def test_a_port_that_swallows_connections_costs_the_connect_budget() -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = []
    try:
        for _ in range(4):  # fills the queue of connections that nobody accepts
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            waiting.append(filler)
        time.sleep(0.05)
        with patient(f"http://127.0.0.1:{listener.getsockname()[1]}") as store:
            started = time.monotonic()
            with pytest.raises(StoreUnavailable) as caught:
                store.get(ENTRY.key)
            assert caught.value.kind is FailureKind.CONNECT
            assert 0.04 < time.monotonic() - started < 0.5
    finally:
        for sock in (*waiting, listener):
            sock.close()
