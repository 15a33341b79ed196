"""Connections: kept, replaced, shared by threads but not by forks; uploads refused early; TLS; what importing costs."""

from __future__ import annotations

import os
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.rawserver import RawServer, answer, read_request, received, requests, reset
from support.replies import entry_headers, hit, miss, problem
from support.waiting import wait_until
from torchtpu_cache import connection as connection_module
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.errors import EntryTooLarge, FailureKind, StoreError, StoreRefused, StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.testing.entries import entry_for

ENTRY = entry_for("the entry", size_bytes=20_000)
LARGE = entry_for("a large entry", size_bytes=8 << 20)


def patient(url: str, answer_seconds: float = 0.3, idle_seconds: float = 0.3) -> RemoteStore:
    return RemoteStore(url, DEFAULT_NAMESPACE, answer_seconds=answer_seconds, idle_seconds=idle_seconds)


# ---- kept connections ------------------------------------------------------------------------------------------


def test_connections_are_kept_over_hits_misses_and_refusals() -> None:
    replies = [hit(ENTRY), miss(), problem(403, "forbidden"), answer(201, **entry_headers(ENTRY))]

    def script(connection: socket.socket) -> None:
        for number, _ in enumerate(requests(connection)):
            connection.sendall(replies[number % 4])

    with RawServer(script) as server, patient(server.url) as store:
        for _ in range(3):
            assert store.get(ENTRY.key) is not None
            assert store.get(ENTRY.key) is None
            with pytest.raises(StoreRefused):
                store.get(ENTRY.key)
            assert store.put(ENTRY).status is PutStatus.CREATED
        assert server.connections == 1


@pytest.mark.parametrize(
    "way", ["close after answer", "reset after answer", "close on the next request", "reset on the next request"]
)
def test_a_connection_that_was_closed_while_idle_is_replaced(way: str) -> None:
    def script(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(miss())
        if way == "close after answer":
            return
        if way == "reset after answer":
            reset(connection)
            return
        select.select([connection], [], [], 5)
        if way == "reset on the next request":
            reset(connection)

    with RawServer(script) as server, patient(server.url) as store:
        for expected in (1, 2, 3):
            assert store.get(ENTRY.key) is None
            assert server.connections == expected
            if way.endswith("after answer"):
                wait_until(lambda: server.ended == server.connections, "the server did not close its connection")


def test_only_one_fresh_connection_is_tried() -> None:
    served = threading.Event()

    def script(connection: socket.socket) -> None:
        read_request(connection)
        if not served.is_set():
            served.set()
            connection.sendall(miss())
            select.select([connection], [], [], 5)

    with RawServer(script) as server, patient(server.url) as store:
        assert store.get(ENTRY.key) is None
        with pytest.raises(StoreUnavailable) as caught:
            store.get(ENTRY.key)
        assert caught.value.kind is FailureKind.RESET
        assert server.connections == 2


def test_a_question_whose_answer_began_is_not_asked_again() -> None:
    def script(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(miss())
        read_request(connection)
        connection.sendall(hit(ENTRY)[:200])

    with RawServer(script) as server, patient(server.url) as store:
        assert store.get(ENTRY.key) is None
        with pytest.raises(StoreUnavailable) as caught:
            store.get(ENTRY.key)
        assert caught.value.kind is FailureKind.RESET
        assert server.connections == 1


def test_bytes_that_nobody_asked_for_end_a_connection() -> None:
    def script(connection: socket.socket) -> None:
        for _ in requests(connection):
            connection.sendall(miss() + hit(ENTRY))

    with RawServer(script) as server, patient(server.url) as store:
        for expected in (1, 2):
            assert store.get(ENTRY.key) is None
            assert server.connections == expected


def test_close_means_close() -> None:
    def script(connection: socket.socket) -> None:
        for _ in requests(connection):
            connection.sendall(answer(404, b"", "text/plain", Connection="close"))

    with RawServer(script) as server, patient(server.url) as store:
        for expected in (1, 2):
            with pytest.raises(StoreRefused):
                store.get(ENTRY.key)
            assert server.connections == expected


# ---- uploads ---------------------------------------------------------------------------------------------------


def test_a_refusal_before_the_body_costs_no_transfer() -> None:
    received = []

    def script(connection: socket.socket) -> None:
        _, headers, rest = read_request(connection, body=False)
        assert headers["expect"] == "100-continue"
        connection.sendall(problem(413, "too_large", limit_bytes=1 << 20, Connection="close"))
        while piece := connection.recv(1 << 20):
            rest += piece
        received.append(len(rest))

    with RawServer(script) as server, patient(server.url) as store:
        with pytest.raises(EntryTooLarge) as caught:
            store.put(LARGE)
        assert caught.value.limit_bytes == 1 << 20
    assert received == [0]


def test_a_peer_that_knows_no_expect_gets_the_body_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_EXPECT_SECONDS", 0.05)
    bodies = []

    def script(connection: socket.socket) -> None:
        _, headers, rest = read_request(connection, body=False)
        while len(rest) < int(headers["content-length"]):
            rest += connection.recv(1 << 20)
        bodies.append(rest)
        connection.sendall(answer(201, **entry_headers(LARGE)))

    with RawServer(script) as server, patient(server.url, idle_seconds=5.0) as store:
        assert store.put(LARGE).status is PutStatus.CREATED
    assert bodies == [bytes(LARGE.buffer)]


def test_a_late_100_continue_inside_the_body_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_EXPECT_SECONDS", 0.01)

    def script(connection: socket.socket) -> None:
        _, headers, rest = read_request(connection, body=False)
        rest = rest or received(connection)  # the client waits no longer, and has begun
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(rest) < int(headers["content-length"]):
            rest += connection.recv(1 << 20)
        connection.sendall(answer(201, **entry_headers(LARGE)))

    with RawServer(script) as server, patient(server.url, idle_seconds=5.0) as store:
        assert store.put(LARGE).status is PutStatus.CREATED


@pytest.mark.parametrize("ending", ["closes", "resets", "stays"])
def test_a_refusal_in_the_midst_of_a_body_is_heard(ending: str) -> None:
    heard = threading.Event()

    def script(connection: socket.socket) -> None:
        _, _, rest = read_request(connection, body=False)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(rest) < 1 << 20:
            rest += connection.recv(1 << 16)
        connection.sendall(problem(507, "full"))
        if ending == "stays":
            assert heard.wait(30)
        elif ending == "resets":
            reset(connection)

    with RawServer(script) as server, patient(server.url) as store:
        with pytest.raises(StoreError) as caught:
            store.put(LARGE)
        heard.set()
    assert caught.value.kind is FailureKind.FULL


def test_uploads_that_break_off_twice_count_as_too_large() -> None:
    def script(connection: socket.socket) -> None:
        _, headers, rest = read_request(connection, body=False)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if int(headers["content-length"]) > 1 << 20:
            while len(rest) < 1 << 20:
                rest += connection.recv(1 << 16)
            reset(connection)
            return
        while len(rest) < int(headers["content-length"]):
            rest += connection.recv(1 << 20)
        connection.sendall(answer(201, **entry_headers(middle)))

    middle = entry_for("a middling entry", size_bytes=900_000)
    with RawServer(script) as server, patient(server.url) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                store.put(LARGE)
            assert caught.value.kind is FailureKind.RESET
            assert store.put(middle).status is PutStatus.CREATED
        tried = server.connections
        for _ in range(5):
            with pytest.raises(EntryTooLarge) as too_large:
                store.put(LARGE)
            assert too_large.value.limit_bytes is None
        assert store.put(middle).status is PutStatus.CREATED
        assert server.connections <= tried + 1


def test_a_broken_pipe_does_not_kill_a_job_that_restored_its_signal() -> None:
    def script(connection: socket.socket) -> None:
        read_request(connection, body=False)
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.recv(1000)
        reset(connection)

    code = """
import signal, sys
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.errors import StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
store = RemoteStore(sys.argv[1], DEFAULT_NAMESPACE)
for _ in range(2):
    try:
        store.put(entry_for("large", size_bytes=8 << 20))
    except StoreUnavailable as error:
        print(error.kind)
"""
    with RawServer(script) as server:
        job = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=60)
    assert (job.returncode, job.stdout.split()) == (0, ["reset", "reset"])


# ---- threads and forks -----------------------------------------------------------------------------------------


def counting_server() -> RawServer:
    def script(connection: socket.socket) -> None:
        for line, _, _ in requests(connection):
            name = line.split(" ")[1].rsplit("/", 1)[1]
            connection.sendall(hit(ENTRY) if name == ENTRY.key else miss())

    return RawServer(script)


def test_many_threads_share_a_few_connections() -> None:
    with counting_server() as server, RemoteStore(server.url, DEFAULT_NAMESPACE) as store:
        other = entry_for("not there")

        def work(thread: int) -> None:
            for i in range(25):
                if (thread + i) % 2:
                    stored = store.get(ENTRY.key)
                    assert stored is not None
                    assert stored.entry.digest == ENTRY.digest
                else:
                    assert store.get(other.key) is None

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert len(store._transport._pool.get().idle) <= 8


# A fork of a threaded process is what is tried here.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own() -> None:
    peers: set[tuple[str, int]] = set()

    def script(connection: socket.socket) -> None:
        for _ in requests(connection):
            peers.add(connection.getpeername())
            connection.sendall(hit(ENTRY))

    with RawServer(script) as server, patient(server.url) as store:
        assert store.get(ENTRY.key) is not None
        ours = set(peers)
        # Every slot and lock of the parent's is taken in the child's copy; none of them may matter there.
        slots = store._transport._pool.get().slots
        taken = 0
        while slots.acquire(blocking=False):
            taken += 1
        pid = os.fork()
        if pid == 0:
            try:
                for _ in range(3):
                    stored = store.get(ENTRY.key)
                    assert stored is not None
                    assert stored.entry.digest == ENTRY.digest
                os._exit(0)
            except BaseException:
                os._exit(1)
        for _ in range(taken):
            slots.release()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(peers - ours) == 1
        assert store.get(ENTRY.key) is not None
        assert len(peers - ours) == 1  # the parent's connection lives on


def test_callers_beyond_the_last_connection_wait_a_bounded_time() -> None:
    with counting_server() as server, patient(server.url) as store:
        slots = store._transport._pool.get().slots
        taken = 0
        while slots.acquire(blocking=False):
            taken += 1
        started = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            store.get(ENTRY.key)
        assert caught.value.kind is FailureKind.TIMEOUT
        assert time.monotonic() - started < 1.5
        for _ in range(taken):
            slots.release()
        assert store.get(ENTRY.key) is not None


def test_closing_ends_kept_connections() -> None:
    ended = threading.Event()

    def script(connection: socket.socket) -> None:
        for _ in requests(connection):
            connection.sendall(miss())
        ended.set()

    with RawServer(script) as server:
        store = patient(server.url)
        assert store.get(ENTRY.key) is None
        store.close()
        store.close()
        assert ended.wait(5)


# ---- TLS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one file."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
def tls_url(certificate: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def script(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            for line, _, _ in requests(secured):
                secured.sendall(hit(LARGE) if line.startswith("GET") else answer(201, **entry_headers(LARGE)))

    with RawServer(script) as server:
        yield server.url.replace("http:", "https:")


def test_tls_with_a_trusted_certificate(tls_url: str, certificate: Path) -> None:
    context = ssl.create_default_context(cafile=str(certificate))
    with RemoteStore(tls_url, DEFAULT_NAMESPACE, ssl_context=context) as store:
        for _ in range(2):
            assert store.put(LARGE).status is PutStatus.CREATED
            stored = store.get(LARGE.key)
            assert stored is not None
            assert stored.entry.digest == LARGE.digest


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_url: str) -> None:
    with patient(tls_url) as store, pytest.raises(StoreRefused, match="does not verify") as caught:
        store.get(LARGE.key)
    assert caught.value.kind is FailureKind.PROTOCOL


def test_a_peer_without_tls_is_no_https(certificate: Path) -> None:
    with counting_server() as server, patient(server.url.replace("http:", "https:")) as store:
        with pytest.raises(StoreError) as caught:
            store.get(ENTRY.key)
        assert caught.value.kind in (FailureKind.RESET, FailureKind.TIMEOUT)


def test_a_peer_that_answers_tls_in_plain_text_is_said_to_speak_none() -> None:
    def script(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with RawServer(script) as server, patient(server.url.replace("http:", "https:")) as store:
        with pytest.raises(StoreRefused, match="use http:// for it") as caught:
            store.get(ENTRY.key)
        assert caught.value.kind is FailureKind.PROTOCOL


# ---- imports ---------------------------------------------------------------------------------------------------


def test_the_store_costs_no_http_library() -> None:
    code = (
        "import sys; import torchtpu_cache.remote, torchtpu_cache.breaker; "
        "sys.exit(bool({'ssl', 'http.client', 'email', 'asyncio'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
