"""One service process: its data folder, its socket, its threads, from start to a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import uvicorn

from torchtpu_cache_core.config import DEFAULT_LISTEN
from torchtpu_cache_core.errors import (
    CacheError,
    ConfigError,
    FailureKind,
    StoreError,
    StoreFull,
    StoreRefused,
)
from torchtpu_cache_core.heap import keep_heap_small
from torchtpu_cache_core.paths import ensure_private_dir
from torchtpu_cache_core.stores.failures import store_error
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.app import create_app
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.express import Express, ExpressProtocol
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.metrics import Metrics
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.trust import is_loopback
from torchtpu_cache_server.upkeep import Upkeep

_log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 20
"""What running requests get to end by themselves after SIGTERM."""

_THREADS: Final = 16
_BACKLOG: Final = 1024
_STUCK_PEER_MS: Final = 60_000


class PortInUse(CacheError):
    """Another process listens there."""


class DataInUse(CacheError):
    """Another service works on this data folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where a service listens.

    Args:
        host: `localhost`, an address of 127.0.0.0/8, or `[::1]`.
        port: 0 takes a free one.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Reads `HOST:PORT`, `:PORT`, or `HOST`.

        Raises:
            ConfigError: it is none of these, or it reaches beyond this machine.
        """
        host, colon, port = text.rpartition(":")
        if not colon or (host.startswith("[") and not host.endswith("]")):
            host, port = text, DEFAULT_LISTEN.rpartition(":")[2]
        host = host or "127.0.0.1"
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ConfigError(f"--listen takes HOST:PORT, such as {DEFAULT_LISTEN}, and not {text[:80]!r}")
        if not is_loopback(host):
            raise ConfigError(
                "without authentication the service listens on this machine only:"
                f" use 127.0.0.1:{port}, not {text[:80]!r}"
            )
        return cls(host=host, port=int(port))

    def bind(self) -> socket.socket:
        """A socket that has the port, and does not listen yet.

        Raises:
            PortInUse: the port is taken.
            ConfigError: the address cannot be listened on.
        """
        is_v6 = self.host.startswith("[")
        address = self.host[1:-1] if is_v6 else "127.0.0.1" if self.host.lower() == "localhost" else self.host
        listener = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM)
        with self._told(listener):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit both. An answer's head and body are two writes, and must not wait for each other.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that takes no byte for a minute loses its connection, and we its buffers.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_PEER_MS)
            listener.bind((address, self.port))
        return listener

    def start(self, listener: socket.socket) -> None:
        """Has a socket that was bound here listen. Raises as `bind`: two may have bound, and only one can listen."""
        with self._told(listener):
            listener.listen(_BACKLOG)

    @contextlib.contextmanager
    def _told(self, listener: socket.socket) -> Iterator[None]:
        """Closes `listener` where the block fails, and raises PortInUse or ConfigError, which say what to do."""
        try:
            yield
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUse(f"port {self.port} of {self.host} is in use; choose another with --listen") from error
            raise ConfigError(f"cannot listen on {self.host}:{self.port}: {os.strerror(error.errno or 0)}") from error

    def url(self, listener: socket.socket) -> str:
        """What a client connects to; `listener` knows the port that was taken."""
        return f"http://{self.host}:{listener.getsockname()[1]}"


@contextlib.contextmanager
def owned_data_dir(path: Path) -> Iterator[Path]:
    """The data folder, private and locked for this process while the block runs; one on a read-only disk as it is.

    Raises:
        DataInUse: another service has it.
        StoreError: it cannot be made or written, or others may write to it.
    """
    ensure_private_dir(path)
    lock, flags = path / "lock", os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | flags, 0o600)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            if not lock.exists():
                raise  # nothing was ever served from here, so there is nothing to read either
            descriptor = os.open(lock, os.O_RDONLY | flags)  # a lock needs no writing
    except OSError as error:
        raise store_error(error, f"{path} cannot be written to; choose another folder with --data-dir") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataInUse(f"another service works on {path}; stop it, or choose another --data-dir") from None
        except OSError as error:
            raise StoreRefused(f"{path} cannot be locked: {os.strerror(error.errno or 0)}") from error
        yield path
    finally:
        os.close(descriptor)


def open_bucket(data_dir: Path) -> tuple[FileBucket, bool]:
    """The bucket, and whether it was proved to work; one on a disk that is full or read-only is not, with a warning.

    Raises:
        StoreError: it is of no use otherwise.
    """
    bucket = FileBucket(data_dir)
    bucket.make_way()
    proved = True
    try:
        bucket.probe()
    except StoreError as error:
        if not (isinstance(error, StoreFull) or error.kind is FailureKind.READ_ONLY):
            raise
        proved = False
        _log.warning(
            "%s cannot be written to (%s): what it holds is served, and puts are refused until it can", data_dir, error
        )
    bucket.keep_room()
    return bucket, proved


@contextlib.contextmanager
def open_index(path: Path, *, or_elsewhere: bool) -> Iterator[SqliteIndex]:
    """The index in `path`.

    Args:
        or_elsewhere: where it cannot be opened there, takes one in the temp folder, to be filled from the bucket.

    Raises:
        StoreError: it cannot be made or opened.
    """
    try:
        index = SqliteIndex(path)
    except StoreError as error:
        if not or_elsewhere:
            raise
        with tempfile.TemporaryDirectory(prefix="torchtpu-cache-index-") as folder:
            index = SqliteIndex(Path(folder) / path.name)
            _log.warning("the index is in the temp folder until the next start: %s", error)
            yield index
        return
    yield index


def serve(*, listen: Listen, data_dir: Path, limits: Limits, ready: Callable[[str], None]) -> None:
    """Runs the service until SIGTERM or SIGINT, then ends what runs and returns.

    Args:
        ready: called with the URL once connections are answered.

    Raises:
        PortInUse, DataInUse, ConfigError, StoreError: it could not start; one sentence says why.
    """
    keep_heap_small()
    _raise_file_limit()
    with (
        contextlib.closing(listen.bind()) as listener,  # first: where that fails, no folder is made
        owned_data_dir(data_dir),
        contextlib.ExitStack() as stack,
    ):
        listen.start(listener)
        metrics = Metrics()
        bucket, proved = open_bucket(data_dir)
        service = Service(
            bucket,
            stack.enter_context(open_index(data_dir / "index.sqlite", or_elsewhere=not proved)),
            limits=limits,
            evicted=metrics.evictions.inc,
            condemned=metrics.condemned.inc,
        )
        upkeep = Upkeep(service)
        threads = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="service")
        try:
            upkeep.start()
            app = create_app(service, threads=threads, metrics=metrics)
            protocol = functools.partial(ExpressProtocol, Express(app.edge))
            config = uvicorn.Config(
                app,
                loop="uvloop",
                http=cast("type[asyncio.Protocol]", protocol),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # the client's address decides who may write
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
                backlog=_BACKLOG,
            )
            _Server(config, lambda: ready(listen.url(listener))).run([listener])
        finally:
            # In this order: no upkeep, no thread of a request, then the files.
            upkeep.stop()
            threads.shutdown(wait=True)
            service.close()


class _Server(uvicorn.Server):
    """uvicorn, telling when it is ready, and ending with a plain return after a signal instead of raising it again."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()


def _raise_file_limit() -> None:
    """As many open files as we may have: a fleet's connections are more than the usual soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # A container's policy may say no; the usual limit then stays.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
