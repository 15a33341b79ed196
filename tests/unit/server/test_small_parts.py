"""Trust's table, problems, health, locks, sizes and addresses."""

from __future__ import annotations

import inspect
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from torchtpu_cache_core import errors
from torchtpu_cache_core.errors import (
    Bypass,
    CacheError,
    ConfigError,
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    StoreUnavailable,
)
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.wire import Problem
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.health import Health
from torchtpu_cache_server.locks import NamedLocks
from torchtpu_cache_server.problems import is_failure, refusal_of
from torchtpu_cache_server.serving import Listen
from torchtpu_cache_server.trust import is_loopback, peer_uid, split_host

_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def _table(folder: Path, *rows: tuple[str, str, str, int, int], name: str = "tcp") -> Path:
    lines = [
        f"   {i}: {local} {remote} {state} 00000000:00000000 00:00000000 00000000 {uid:5} 0 {inode} 1 0 20 4 30 10 -1\n"
        for i, (local, remote, state, uid, inode) in enumerate(rows)
    ]
    (folder / name).write_text(_HEAD + "".join(lines))
    return folder


def test_the_uid_of_exactly_that_connection(tmp_path: Path) -> None:
    ours, theirs = "0100007F:1F8D", "0100007F:D431"
    folder = _table(
        tmp_path,
        (ours, theirs, "01", 7, 11),
        (theirs, ours, "01", 1000, 22),
        ("0200007F:D431", ours, "01", 8, 33),
    )
    assert peer_uid(("127.0.0.1", 0xD431), ("127.0.0.1", 0x1F8D), folder) == 1000
    assert peer_uid(("127.0.0.1", 0xD432), ("127.0.0.1", 0x1F8D), folder) is None
    assert peer_uid(("127.0.0.1", 0xD431), ("127.0.0.2", 0x1F8D), folder) is None


@pytest.mark.parametrize(("state", "inode"), [("06", 22), ("05", 22), ("08", 22), ("01", 0)])
def test_a_closed_connection_is_nobodys(tmp_path: Path, state: str, inode: int) -> None:
    """The kernel shows uid 0 for a socket that its owner closed, which must not pass for root's."""
    folder = _table(tmp_path, ("0100007F:D431", "0100007F:1F8D", state, 0, inode))
    assert peer_uid(("127.0.0.1", 0xD431), ("127.0.0.1", 0x1F8D), folder) is None


def test_ipv6(tmp_path: Path) -> None:
    one = "00000000000000000000000001000000"
    folder = _table(tmp_path, (f"{one}:D431", f"{one}:1F8D", "01", 1000, 22), name="tcp6")
    assert peer_uid(("::1", 0xD431), ("::1", 0x1F8D), folder) == 1000


@pytest.mark.parametrize("content", [None, "", _HEAD, "garbage\n" * 10, _HEAD + "0: 0100007F:D431 0100007F:1F8D 01\n"])
def test_a_kernel_that_does_not_say(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tcp").write_text(content)
    assert peer_uid(("127.0.0.1", 0xD431), ("127.0.0.1", 0x1F8D), tmp_path) is None


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_real_kernel_knows_this_process(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.create_server((host, 0), family=family) as listener:
        client = socket.create_connection(listener.getsockname()[:2])
        accepted, peer = listener.accept()
        with accepted:
            assert peer_uid(peer[:2], accepted.getsockname()[:2]) == os.geteuid()
            client.close()
            assert peer_uid(peer[:2], accepted.getsockname()[:2]) is None


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:80", "localhost"),
        ("[::1]:80", "[::1]"),
        ("[::1]", "[::1]"),
        ("a:b", "a:b"),
        ("::1", ":"),
        ("a", "a"),
    ],
)
def test_hosts_and_ports(host: str, name: str) -> None:
    assert split_host(host) == name
    assert not is_loopback(":")


def _error_classes() -> list[type[CacheError]]:
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, CacheError)]


@pytest.mark.parametrize("kind", _error_classes())
@pytest.mark.parametrize("uploading", [False, True])
def test_every_error_has_its_status(kind: type[CacheError], uploading: bool) -> None:
    if kind is EntryTooLarge:
        error: CacheError = EntryTooLarge(5, 4)
    elif kind is CorruptEntry:
        error = CorruptEntry(CorruptReason.DIGEST, "/secret/path")
    elif kind is Bypass:
        error = Bypass("reason")
    else:
        error = kind("/secret/path")
    status, headers, body = refusal_of(error, uploading=uploading).answer()
    problem = Problem.from_json(json.loads(body), status)
    assert problem.status == status >= 400
    assert problem.kind
    assert problem.title != "The request failed"
    assert dict(headers)[b"content-length"] == str(len(body)).encode()
    assert status < 500 or b"/secret" not in body
    assert is_failure(error, uploading=uploading) == (status >= 500 and status != 507)


def test_waits_are_whole_seconds() -> None:
    headers = dict(refusal_of(StoreUnavailable("x", retry_after_seconds=0.2)).answer()[1])
    assert headers[b"retry-after"] == b"1"


def test_health_asks_once_a_second_and_forgets() -> None:
    clock, asked, broken = ManualClock(), [], [False]

    def probe() -> None:
        asked.append(1)
        if broken[0]:
            raise StoreUnavailable("the disk is gone")

    health = Health(probe, clock, steady=3)
    assert health.reason() is None
    assert health.reason() is None
    assert len(asked) == 1
    broken[0] = True
    clock.advance(2)
    assert health.reason() == "the disk is gone"
    broken[0] = False
    clock.advance(2)
    assert health.reason() is None
    for _ in range(2):
        health.failed()
    assert health.reason() is None
    health.failed()
    assert health.reason() is not None
    health.succeeded()
    assert health.reason() is None
    for _ in range(3):
        health.failed()
    clock.advance(31)
    assert health.reason() is None


def test_locks_by_name() -> None:
    locks = NamedLocks()
    inside, order = threading.Event(), []

    def hold() -> None:
        inside.set()
        with locks.hold("a"):
            order.append("second")

    with locks.hold("a"):
        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(10)
        with locks.hold("b"):
            order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert locks._locks == {}
    with pytest.raises(RuntimeError), locks.hold("a"):
        raise RuntimeError
    assert locks._locks == {}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80),
        (":0", "127.0.0.1", 0),
        ("localhost", "localhost", 8077),
        ("[::1]", "[::1]", 8077),
        ("[::1]:5", "[::1]", 5),
        ("127.5.5.5", "127.5.5.5", 8077),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Listen.parse(text) == Listen(host=host, port=port)


@pytest.mark.parametrize(
    "text", ["0.0.0.0", "*:80", "[::]:80", "example.org:80", "127.0.0.1:", "127.0.0.1:x", ":70000", "::1"]
)
def test_addresses_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Listen.parse(text)


@pytest.mark.parametrize(
    "limits",
    [
        {"limit_bytes": 0},
        {"limit_entries": 0},
        {"min_free_bytes": -1},
        {"max_entry_bytes": 0},
        {"max_entry_bytes": 3 << 30},
    ],
)
def test_limits_that_make_no_sense(limits: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Limits(**limits)
