"""The most memory that one worker of the service takes under many large reads and puts at the same time.

64 connections read and 64 put entries of 92 MB that do not compress, all of them at once, over loopback. Every other
reader and every other writer is slow (at most about 8 MB/s); every other pair of readers sends heads of which no two
are the same, so that both ways of the service are under way (docs/decisions/013). Readers begin again until the last
put is answered. Every put must be answered 201, every body read must have its entry's digest, and what was put is
looked up at the end. The figure is the kernel's own account of the process (VmHWM), the page cache not in it.

The entries put share their random payload, and differ in their headers, and so in their digests: the service hashes,
writes and fsyncs each of them. They take 6 GB of disk while this runs. There is no limit on concurrent uploads but
the descriptors of the process and the disk: sixteen threads do the work of all connections.

The short form is 8 and 8 connections with entries of 8 MB.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from support.clean import clean_folder
from support.figures import Figure, Size
from support.served import Served, launch
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import FORMAT_VERSION, MAGIC, PREFIX
from torchtpu_cache_core.header import CODEC_RAW, Header
from torchtpu_cache_core.key import key_of
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest
from torchtpu_cache_core.testing.entries import components_for, entry_for

_BAR_MB = 300
_ENTRIES_READ = 4
_PIECE_BYTES = 256 << 10
_SLOW_PAUSE_SECONDS = 0.03
_TIMEOUT_SECONDS = 300.0


def run(size: Size) -> Iterator[Figure]:
    connections, payload_bytes = size.of(8, 64), size.of(8_000_000, 92_000_000)
    payload = memoryview(os.urandom(payload_bytes))
    with clean_folder() as folder:
        needed_bytes = (connections + _ENTRIES_READ) * payload_bytes
        if shutil.disk_usage(folder).free < 2 * needed_bytes:
            raise RuntimeError(f"this needs {2 * needed_bytes / 1e9:.0f} GB of free disk at {folder.parent}")
        served = launch(folder / "data", "--max-size", "64TB")
        try:
            yield _measure(served, payload, connections)
        finally:
            served.stop()


@dataclass(frozen=True, slots=True)
class _Large:
    """A valid entry in three parts, the largest of them shared with others.

    Args:
        head: prefix and header.
    """

    path: str
    head: bytes
    payload: memoryview
    trailer: bytes
    digest: Digest

    @property
    def size_bytes(self) -> int:
        return len(self.head) + len(self.payload) + len(self.trailer)

    @classmethod
    def of(cls, name: str, payload: memoryview) -> _Large:
        components = tuple(components_for(name))
        header: Header = replace(
            entry_for(name).header,
            key=key_of(components),
            components=components,
            codec=CODEC_RAW,
            executable_bytes=len(payload),
        )
        raw = header.to_bytes()
        head = PREFIX.pack(MAGIC, FORMAT_VERSION, 0, len(raw), len(payload)) + raw
        body = hashlib.sha256(head)
        body.update(payload)
        trailer = body.digest()
        body.update(trailer)
        path = wire.entry_path(DEFAULT_NAMESPACE, header.key)
        return cls(path, head, payload, trailer, Digest(body.hexdigest()))


class _Peer:
    """Reads and puts, each on a connection of its own; AssertionError where anything is not right. Thread-safe."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._numbers = itertools.count()

    def put(self, entry: _Large, *, slow: bool) -> None:
        """Puts an entry; 201 is the answer."""
        head = (
            f"PUT {entry.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Digest: {wire.content_digest(entry.digest)}\r\nContent-Length: {entry.size_bytes}\r\n\r\n"
        )
        with self._connect() as connection:
            connection.sendall(head.encode() + entry.head)
            for start in range(0, len(entry.payload), _PIECE_BYTES):
                connection.sendall(entry.payload[start : start + _PIECE_BYTES])
                if slow:
                    time.sleep(_SLOW_PAUSE_SECONDS)
            connection.sendall(entry.trailer)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 201 "), answer[:300]

    def get(self, entry: _Large, *, slow: bool, heads_differ: bool) -> None:
        """Reads an entry, and compares the digest of what came."""
        more = f"Request-Id: {next(self._numbers)}\r\n" if heads_differ else ""
        with self._connect() as connection, connection.makefile("rb", buffering=_PIECE_BYTES) as answer:
            connection.sendall(f"GET {entry.path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
            assert answer.readline().startswith(b"HTTP/1.1 200 ")
            while answer.readline() not in (b"\r\n", b""):
                pass
            digest, left = hashlib.sha256(), entry.size_bytes
            while left and (piece := answer.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                left -= len(piece)
                if slow:
                    time.sleep(_SLOW_PAUSE_SECONDS)
        assert digest.hexdigest() == entry.digest, f"{left} bytes are lacking"

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=_TIMEOUT_SECONDS)


def _measure(served: Served, payload: memoryview, connections: int) -> Figure:
    known = [_Large.of(f"read {number}", payload) for number in range(_ENTRIES_READ)]
    new = [_Large.of(f"put {number}", payload) for number in range(connections)]
    peer = _Peer(served.port)
    for entry in known:
        peer.put(entry, slow=False)
        peer.get(entry, slow=False, heads_differ=False)
    before_bytes, started = served.resident_bytes()[0], time.monotonic()
    together, all_put = threading.Barrier(2 * connections), threading.Event()

    def read(number: int) -> int:
        together.wait()
        count = 0
        while not count or not all_put.is_set():
            peer.get(known[number % len(known)], slow=number % 2 == 1, heads_differ=number % 4 >= 2)
            count += 1
        return count

    def put(number: int) -> None:
        together.wait()
        peer.put(new[number], slow=number % 2 == 1)
        print(f"  put {number} of {connections}", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(2 * connections) as threads:
        reads = [threads.submit(read, number) for number in range(connections)]
        puts = [threads.submit(put, number) for number in range(connections)]
        try:
            for job in puts:
                job.result()
        finally:
            all_put.set()
        counts = [job.result() for job in reads]
    seconds, most_bytes = time.monotonic() - started, served.resident_bytes()[1]
    for entry in new:
        assert served.ask("HEAD", entry.path).headers["etag"] == wire.etag(entry.digest)
    return Figure.at_most(
        "worker_memory",
        most_bytes / 1e6,
        "MB",
        _BAR_MB,
        before_mb=round(before_bytes / 1e6, 1),
        entry_mb=round(payload.nbytes / 1e6),
        puts=connections,
        readers=connections,
        reads=sum(counts),
        seconds=round(seconds, 1),
    )
