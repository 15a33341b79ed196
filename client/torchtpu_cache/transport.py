"""Exchanges with one service over a few kept-alive connections; the pool, the dialling, and what a broken one means.

Proxies from the environment are not used: only loopback is spoken to.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from torchtpu_cache.connection import Answer, Connection, Patience, Question, Stream
from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.endpoint import Endpoint
from torchtpu_cache_core.errors import FailureKind, StoreRefused, StoreUnavailable
from torchtpu_cache_core.perprocess import PerProcess

if TYPE_CHECKING:
    import ssl

_MAX_IDLE_CONNECTIONS: Final = 8
_MAX_IDLE_SECONDS: Final = 60.0


class _Pool:
    """Connections. The semaphore bounds the open ones; idle ones are taken last in, first out."""

    def __init__(self, max_connections: int) -> None:
        self.slots = threading.BoundedSemaphore(max_connections)
        self.idle: deque[Connection] = deque()
        self.open: set[Connection] = set()
        self.closed = False

    def close_idle(self) -> None:
        while self.idle:
            with contextlib.suppress(IndexError):  # another thread took it meanwhile
                self.discard(self.idle.pop())

    def discard(self, connection: Connection) -> None:
        self.open.discard(connection)
        connection.close()

    def abandon(self) -> None:
        """In a forked child: drops the parent's sockets. No lock of the parent's is touched, for it may be held."""
        for connection in tuple(self.open):
            connection.stream.abandon()


class Transport:
    """Exchanges with one service over a few kept-alive connections. Thread-safe, and safe to use after a fork.

    Args:
        max_connections: open at one time; further callers wait for `patience.answer_seconds` at most.
        ssl_context: for https; the default checks against the system's certificates.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        patience: Patience,
        *,
        clock: Clock,
        max_connections: int = 64,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._patience = patience
        self._clock = clock
        self._ssl_context = ssl_context
        self._pool = PerProcess(partial(_Pool, max_connections), abandon=_Pool.abandon)

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def close(self) -> None:
        """Closes idle connections at once, the others when their exchange ends."""
        pool = self._pool.get()
        pool.closed = True
        pool.close_idle()

    @contextlib.contextmanager
    def exchange(self, question: Question) -> Iterator[Answer]:
        """Asks, and gives the answer for the time of the `with` block; an unread body ends the connection.

        Raises:
            StoreUnavailable: CONNECT, TIMEOUT, RESET or IO; also for what happens inside the block.
            StoreRefused: PROTOCOL, the peer does not speak HTTP or its certificate does not verify.
        """
        where = self._endpoint.authority
        pool = self._pool.get()
        if not pool.slots.acquire(timeout=self._patience.answer_seconds):
            raise StoreUnavailable(f"all connections to {where} are in use", FailureKind.TIMEOUT)
        connection: Connection | None = None
        answer: Answer | None = None
        try:
            connection, answer = self._ask(pool, self._idle_connection(pool), question)
            yield answer
        except TimeoutError:
            raise StoreUnavailable(f"the remote {where} did not answer in time", FailureKind.TIMEOUT) from None
        except OSError as error:
            raise StoreUnavailable(
                f"the connection to the remote {where} broke off ({_reason(error)})", FailureKind.RESET
            ) from error
        finally:
            if connection is not None:
                self._put_back(pool, connection, answer)
            pool.slots.release()

    def _put_back(self, pool: _Pool, connection: Connection, answer: Answer | None) -> None:
        """Keeps the connection if the answer was read to its end, whatever the caller made of it."""
        if answer is None or not answer.reusable or pool.closed or len(pool.idle) >= _MAX_IDLE_CONNECTIONS:
            pool.discard(connection)
            return
        connection.idle_since = self._clock.monotonic()
        pool.idle.append(connection)

    def _idle_connection(self, pool: _Pool) -> Connection | None:
        while pool.idle:
            try:
                connection = pool.idle.pop()
            except IndexError:  # another thread took the last one
                return None
            if self._clock.monotonic() - connection.idle_since < _MAX_IDLE_SECONDS and connection.quiet():
                return connection
            pool.discard(connection)
        return None

    def _ask(self, pool: _Pool, connection: Connection | None, question: Question) -> tuple[Connection, Answer]:
        """Asks over `connection`, or a fresh one; once more where the service closed a kept one in this moment."""
        if connection is not None:
            try:
                return connection, connection.ask(question)
            except ConnectionError:
                pool.discard(connection)
                if not connection.untouched:
                    raise
            except BaseException:
                pool.discard(connection)
                raise
        connection = self._connect()
        pool.open.add(connection)
        try:
            return connection, connection.ask(question)
        except BaseException:
            pool.discard(connection)
            raise

    def _connect(self) -> Connection:
        deadline = self._clock.monotonic() + self._patience.connect_seconds
        failure: OSError | None = None
        for address in self._endpoint.addresses:
            try:
                sock = self._dial(address, max(0.001, deadline - self._clock.monotonic()))
            except OSError as error:
                failure = failure or error
                continue
            try:
                return self._secured(sock)
            except BaseException:
                sock.close()
                raise
        assert failure is not None
        kind = FailureKind.IO if failure.errno in (errno.EMFILE, errno.ENFILE) else FailureKind.CONNECT
        raise StoreUnavailable(
            f"the remote {self._endpoint.authority} cannot be reached ({_reason(failure)})", kind
        ) from failure

    def _dial(self, address: str, timeout_seconds: float) -> socket.socket:
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_seconds)
            sock.connect((address, self._endpoint.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sock.getsockname() == sock.getpeername():
                # Linux lets a socket connect to itself where nobody listens on an ephemeral port.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
        except BaseException:
            sock.close()
            raise
        return sock

    def _secured(self, sock: socket.socket) -> Connection:
        would_block: tuple[type[OSError], ...] = (BlockingIOError,)
        send_flags: int = socket.MSG_NOSIGNAL  # the job may have given SIGPIPE back its power to kill
        if self._endpoint.tls:
            import ssl

            if self._ssl_context is None:
                self._ssl_context = ssl.create_default_context()
            sock.settimeout(self._patience.answer_seconds)
            try:
                sock = self._ssl_context.wrap_socket(sock, server_hostname=self._endpoint.host)
            except ssl.SSLCertVerificationError as error:
                raise StoreRefused(
                    f"the certificate of {self._endpoint.authority} does not verify ({error.verify_message})",
                    FailureKind.PROTOCOL,
                ) from error
            except ssl.SSLError as error:
                if error.reason not in _NO_TLS:
                    raise
                raise StoreRefused(
                    f"{self._endpoint.authority} does not speak TLS; use http:// for it", FailureKind.PROTOCOL
                ) from error
            would_block = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
            send_flags = 0  # an SSLSocket takes none
        return Connection(Stream(sock, self._clock, would_block, send_flags), self._endpoint, self._patience)


_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})
"""What OpenSSL calls an answer in plain text, by release."""


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
