"""How much the blob path saves over a framework's route: printed, with a bar that only a real mistake misses."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from support.served import Served, path_of
from torchtpu_cache_core.testing.entries import entry_for

_SIZES = {"10k": 10_000, "1m": 1_000_000}
_SECONDS = 0.8


def _serve_route(sizes: dict[str, int], port: Connection) -> None:
    """The same bytes from a FastAPI route with a file response, which is how one would do it at first."""
    import tempfile
    from pathlib import Path

    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import FileResponse

    app = FastAPI()
    folder = Path(tempfile.mkdtemp())
    for name, size_bytes in sizes.items():
        (folder / name).write_bytes(os.urandom(size_bytes))

    @app.get("/v1/{namespace}/entries/{name}")
    async def read(namespace: str, name: str) -> FileResponse:
        return FileResponse(folder / name)

    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname()[1])
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_config=None, access_log=False, lifespan="off")
    asyncio.run(uvicorn.Server(config).serve([listener]))


def _rate(port: int, path: str) -> float:
    """Requests a second over one connection."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    buffer = bytearray(1 << 20)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        count, end = 0, time.monotonic() + _SECONDS
        while time.monotonic() < end:
            connection.sendall(request)
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            start, _, body = head.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 200")
            length = next(line for line in start.lower().split(b"\r\n") if line.startswith(b"content-length"))
            left = int(length.split(b":")[1]) - len(body)
            while left > 0:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            count += 1
    return count / _SECONDS


@pytest.mark.slow
def test_the_blob_path_beats_a_route(start: Callable[..., Served]) -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_route, args=(_SIZES, theirs))
    process.start()
    try:
        served = start()
        port = ours.recv()
        entries = {name: entry_for(name, executable=os.urandom(size)) for name, size in _SIZES.items()}
        for name, entry in entries.items():
            served.put(entry)
            raw, route = [], []
            for _ in range(3):
                raw.append(_rate(served.port, path_of(entry)))
                route.append(_rate(port, f"/v1/default/entries/{name}"))
            ratio = statistics.median(raw) / statistics.median(route)
            print(
                f"{name}: {statistics.median(raw):,.0f}/s, a route {statistics.median(route):,.0f}/s: {ratio:.1f} times"
            )
            assert ratio > 1.2
        print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000} MB")
    finally:
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
