"""How much the blob path saves over a framework's route: printed, with a bar that only a real mistake misses."""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.served import Served, path_of
from torchtpu_cache_core.testing.entries import entry_for

_SIZES = {"10k": 10_000, "1m": 1_000_000}
_SECONDS = 0.8


_ROUTE = """
import asyncio, socket, sys, uvicorn
from fastapi import FastAPI
from fastapi.responses import FileResponse
app = FastAPI()

@app.get("/v1/{namespace}/entries/{name}")
async def read(namespace: str, name: str) -> FileResponse:
    return FileResponse(f"{sys.argv[1]}/{name}")

listener = socket.create_server(("127.0.0.1", 0))
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
print(listener.getsockname()[1], flush=True)
config = uvicorn.Config(app, loop="uvloop", http="httptools", log_config=None, access_log=False, lifespan="off")
asyncio.run(uvicorn.Server(config).serve([listener]))
"""
"""The same bytes from a FastAPI route with a file response, which is how one would do it at first."""


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
def test_the_blob_path_beats_a_route(start: Callable[..., Served], tmp_path: Path) -> None:
    served = start()
    route = subprocess.Popen([sys.executable, "-c", _ROUTE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert route.stdout is not None
        port = int(route.stdout.readline())
        for name, size_bytes in _SIZES.items():
            entry = entry_for(name, executable=os.urandom(size_bytes))
            (tmp_path / name).write_bytes(entry.buffer)
            served.put(entry)
            ours, theirs = [], []
            for _ in range(3):
                ours.append(_rate(served.port, path_of(entry)))
                theirs.append(_rate(port, f"/v1/default/entries/{name}"))
            rates = statistics.median(ours), statistics.median(theirs)
            print(f"{name}: {rates[0]:,.0f}/s, a route {rates[1]:,.0f}/s: {rates[0] / rates[1]:.1f} times")
            assert rates[0] > 1.2 * rates[1]
    finally:
        route.kill()
        route.communicate()
