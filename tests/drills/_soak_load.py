"""The two services of `soak`, and who treats them badly."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from support.service import start_service
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for

_RESET: Final = struct.pack("ii", 1, 0)
_RESTART_SECONDS: Final = 120.0
_UNFORESEEN: Final = re.compile(
    r"(?:request [0-9a-f]{16}|a round of upkeep) failed\nTraceback.*?\n(?=\S*Error)\S.*", re.DOTALL
)
"""What the service logs of an error that nobody foresaw."""


class Standing:
    """A real service that may be started anew on the same port and folder; its counters are summed up."""

    def __init__(self, data_dir: Path, limit_bytes: int) -> None:
        self.data_dir = data_dir
        self._options = ("--max-size", str(limit_bytes))
        self._process = start_service(data_dir, *self._options)
        self.url = self._process.url
        self.port = self._process.port
        self.counted: Counter[str] = Counter()
        self.errors: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.process.pid

    def restart(self, *, orderly: bool) -> None:
        """Ends it, by SIGTERM or by SIGKILL, and starts it again."""
        self.end(orderly=orderly)
        deadline = time.monotonic() + _RESTART_SECONDS
        while True:
            try:
                self._process = start_service(self.data_dir, *self._options, listen=f"127.0.0.1:{self.port}")
            except RuntimeError:  # starved, or a client has its port just now
                if time.monotonic() > deadline:
                    raise
            else:
                return

    def end(self, *, orderly: bool) -> None:
        """Takes its counters, and ends it. An orderly end that is none is an error."""
        self._count()
        if not orderly:
            self._process.kill()
        elif code := self._process.stop():
            self.errors.append(f"the service ended with {code}")

    def kill(self) -> None:
        """For the drill's own end; harmless where it has ended."""
        if self._process.process.poll() is None:
            self._process.kill()

    def _count(self) -> None:
        log = self.data_dir.with_name(self.data_dir.name + ".log").read_text(errors="replace")
        self.errors += _UNFORESEEN.findall(log)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                status = sample.labels.get("status")
                self.counted[sample.name + (f" {status}" if status else "")] += int(sample.value)


class Vandal:
    """Breaks connections, cancels uploads and downloads, and damages blobs, in a thread of its own."""

    def __init__(self, services: list[Standing], seed: int, pause_seconds: float) -> None:
        self.done: Counter[str] = Counter()
        self._services = services
        self._chance = random.Random(seed)
        self._pause_seconds = pause_seconds
        self._stop = threading.Event()
        self._entries = [entry_for(f"cancelled {number}", size_bytes=200_000) for number in range(8)]
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        acts = (self._half_head, self._garbage, self._cancel_upload, self._cancel_download, self._damage)
        while not self._stop.wait(self._chance.uniform(0.0, 2 * self._pause_seconds)):
            act = self._chance.choice(acts)
            with contextlib.suppress(OSError):  # the service is restarting, or quicker
                act(self._chance.choice(self._services))
                self.done[act.__name__.strip("_")] += 1

    def _half_head(self, service: Standing) -> None:
        with self._connected(service) as connection:
            connection.sendall(b"GET /v1/default/entries HTTP/1.1\r\nHost: local")

    def _garbage(self, service: Standing) -> None:
        with self._connected(service) as connection:
            connection.sendall(self._chance.randbytes(self._chance.randrange(1, 3000)))

    def _cancel_upload(self, service: Standing) -> None:
        entry = self._chance.choice(self._entries)
        with self._connected(service) as connection:
            connection.sendall(_head("PUT", entry, entry.size_bytes))
            connection.sendall(entry.buffer[: self._chance.randrange(entry.size_bytes)])

    def _cancel_download(self, service: Standing) -> None:
        names = list((service.data_dir / "entries" / DEFAULT_NAMESPACE).glob("*"))
        if not names:
            return
        head = f"GET /v1/default/entries/{self._chance.choice(names).name} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with self._connected(service) as connection:
            connection.sendall(head.encode())
            connection.recv(self._chance.randrange(1, 2000))

    def _damage(self, service: Standing) -> None:
        """A blob rots: it is replaced by one with a bit flipped, or cut."""
        blobs = list((service.data_dir / "blobs" / "sha256").glob("*/[0-9a-f]*"))
        if not blobs:
            return
        blob = self._chance.choice(blobs)
        data = bytearray(blob.read_bytes())
        data[self._chance.randrange(len(data))] ^= 1
        damaged = service.data_dir.with_name("damaged blob")
        damaged.write_bytes(data[: self._chance.choice((len(data), len(data) // 2))])
        damaged.replace(blob)

    @contextlib.contextmanager
    def _connected(self, service: Standing) -> Iterator[socket.socket]:
        """A connection that ends with a reset, or in silence."""
        with socket.create_connection(("127.0.0.1", service.port), timeout=5) as connection:
            yield connection
            if self._chance.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _head(method: str, entry: Entry, length: int) -> bytes:
    lines = (
        f"{method} /v1/{DEFAULT_NAMESPACE}/entries/{entry.key} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length}",
        f"{wire.CONTENT_DIGEST_HEADER}: {wire.content_digest(entry.digest)}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
