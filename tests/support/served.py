"""The real `serve` in a process of its own, and plain HTTP to it without our client."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.procwatch import resident_bytes
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE

SERVE = [sys.executable, "-m", "torchtpu_cache.cli.main", "serve"]


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def kind(self) -> str:
        """Of a problem, which every error must be."""
        assert self.headers["content-type"] == wire.PROBLEM_CONTENT_TYPE
        assert self.json["status"] == self.status
        assert self.headers["torchtpu-cache-problem"] == self.json["kind"]
        return str(self.json["kind"])


@dataclass
class Served:
    """A running service; ended by its own pid only."""

    process: subprocess.Popen[str]
    port: int
    data_dir: Path
    host: str = "127.0.0.1"
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """One request on a connection of its own; header names are given with _ for -."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def put(self, entry: Entry, namespace: str = DEFAULT_NAMESPACE, **headers: str) -> Answer:
        headers = {"Content_Digest": wire.content_digest(entry.digest)} | headers
        return self.ask("PUT", path_of(entry, namespace), bytes(entry.buffer), **headers)

    def get(self, entry: Entry, namespace: str = DEFAULT_NAMESPACE, **headers: str) -> Answer:
        return self.ask("GET", path_of(entry, namespace), **headers)

    def connect(self) -> socket.socket:
        """A raw connection, closed at the end of the test."""
        return self._stack.enter_context(socket.create_connection((self.host, self.port), timeout=30))

    def raw(self, data: bytes) -> bytes:
        """Sends bytes, and gives all that comes back until the service closes."""
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            connection.sendall(data)
            return read_all(connection)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self._stack.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()

    def kill(self) -> None:
        self._stack.close()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def resident_bytes(self) -> tuple[int, int]:
        """Now, and at most so far."""
        return resident_bytes(self.process.pid)


def path_of(entry: Entry, namespace: str = DEFAULT_NAMESPACE) -> str:
    return f"/v1/{namespace}/entries/{entry.key}"


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass  # the service closed on bytes that it did not read
    return bytes(received)


def launch(
    data_dir: Path,
    *options: str,
    listen: str = "127.0.0.1:0",
    preexec: Callable[[], None] | None = None,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Served:
    """Starts the service, in this process's environment or in `environ`, and returns when it listens.

    Args:
        log: a file for what it writes to standard error; this process's own where there is none.

    Raises:
        RuntimeError: it ended, or did not say that it listens; with its last words, if there is a log.
    """
    command = [*SERVE, "--listen", listen, "--data-dir", str(data_dir), "--json", *options]
    with contextlib.nullcontext() if log is None else log.open("ab") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, preexec_fn=preexec, env=environ
        )
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 30)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        process.stdout.close()
        said = "" if log is None else log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the service did not start; it ended with {process.wait()}: {said}")
    return Served(process, int(json.loads(line)["url"].rpartition(":")[2]), data_dir)
