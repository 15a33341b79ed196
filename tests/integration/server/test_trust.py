"""Loopback is not trust: foreign hosts, foreign origins, foreign users."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.served import Served, path_of
from torchtpu_cache_core import wire
from torchtpu_cache_core.testing.entries import entry_for


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.8.9.1:8077", "[::1]", "[::1]:9"])
def test_hosts_of_this_machine(served: Served, host: str) -> None:
    assert served.ask("GET", "/healthz", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:8077",
        "localhost@evil.example",
        "128.0.0.1",
        "0.0.0.0",
        "10.0.0.1:80",
        "[::2]",
        "[::ffff:127.0.0.1]",
        "[::1",
        "::1",
        "2130706433",
        "127.1",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/healthz", "/v1/default/entries", path_of(entry_for("x"))])
def test_foreign_hosts(served: Served, host: str, path: str) -> None:
    answer = served.ask("GET", path, Host=host)
    assert (answer.status, answer.kind) == (421, "misdirected")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://localhost", "http://localhost:1", "http://127.0.0.1", "*", ""]
)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
def test_foreign_origins(served: Served, origin: str, method: str) -> None:
    entry = entry_for("origin")
    path = "/v1/default/lookup" if method == "POST" else path_of(entry)
    answer = served.ask(method, path, bytes(entry.buffer), Origin=origin)
    assert (answer.status, answer.kind) == (403, "origin")
    assert "access-control-allow-origin" not in answer.headers


def test_the_own_origin(served: Served) -> None:
    host = f"127.0.0.1:{served.port}"
    assert served.ask("GET", "/healthz", Host=host, Origin=f"http://{host}").status == 200


_OTHER_USER = """
import encodings.idna, http.client, os, sys  # the other user may not be able to read the interpreter's files
os.setgid(65534); os.setuid(65534)
port, path, digest = int(sys.argv[1]), sys.argv[2], sys.argv[3]
body = sys.stdin.buffer.read()
for method, target, content in (
    ("PUT", path, body), ("DELETE", path, None), ("POST", "/v1/default/uploads", b"{}"), ("GET", path, None),
    ("POST", "/v1/default/lookup", b'{"keys": []}'),
):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, target, content, {"Content-Digest": digest})
    answer = connection.getresponse()
    print(answer.status, answer.getheader("torchtpu-cache-problem"))
    connection.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_may_read_and_not_write(served: Served) -> None:
    entry = entry_for("another user")
    script = [sys.executable, "-c", _OTHER_USER, str(served.port), path_of(entry), wire.content_digest(entry.digest)]

    def run() -> list[str]:
        done = subprocess.run(script, input=bytes(entry.buffer), stdout=subprocess.PIPE, check=True, timeout=60)
        return done.stdout.decode().splitlines()

    refused = ["403 peer"] * 3
    assert run() == [*refused, "404 not_found", "200 None"]
    assert served.put(entry).status == 201
    assert run() == [*refused, "200 None", "200 None"]
