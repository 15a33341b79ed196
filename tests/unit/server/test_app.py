"""The application in this process, without sockets: dawdling and vanishing peers, failing storage, what is counted."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.faultybucket import FaultyBucketFiles
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for
from torchtpu_cache_core.testing.faults import Fault
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.app import create_app
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.trust import LoopbackTrust
from torchtpu_cache_server.upkeep import reconcile

_LARGE = entry_for("large", size_bytes=1 << 20)
_STALL = object()
_GONE = object()


class Peer:
    """One request over ASGI. `body` is what it sends: bytes, or _STALL, or _GONE."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.messages: list[dict[str, Any]] = []
        self.takes_bytes = True
        self.asked_for = 0

    async def ask(self, method: str, path: str, *body: object, headers: dict[str, str] | None = None) -> int:
        pieces = list(body)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(b"host", b"localhost")]
            + [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

        async def receive() -> dict[str, Any]:
            self.asked_for += 1
            piece = pieces.pop(0) if pieces else b""
            if piece is _STALL:
                await asyncio.sleep(3600)
            if piece is _GONE:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(message: dict[str, Any]) -> None:
            if not self.takes_bytes and message["type"] == "http.response.body":
                await asyncio.sleep(3600)
            self.messages.append(message)

        await self.app(scope, receive, send)
        return self.status

    async def put(self, entry: Entry, *body: object) -> int:
        headers = {"Content-Digest": wire.content_digest(entry.digest), "Content-Length": str(entry.size_bytes)}
        return await self.ask("PUT", wire.entry_path(DEFAULT_NAMESPACE, entry.key), *body, headers=headers)

    async def get(self, entry: Entry) -> int:
        return await self.ask("GET", wire.entry_path(DEFAULT_NAMESPACE, entry.key))

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"]) if self.messages else 0

    @property
    def body(self) -> bytes:
        return b"".join(bytes(message.get("body", b"")) for message in self.messages[1:])


class House:
    def __init__(self, place: Path) -> None:
        self.files = FaultyBucketFiles()
        self.clock = ManualClock()
        self.service = Service(
            FileBucket(place, files=self.files),
            SqliteIndex(place / "index.sqlite"),
            limits=Limits(min_free_bytes=0),
            clock=self.clock,
        )
        reconcile(self.service)
        self.threads = ThreadPoolExecutor(4)
        trust = LoopbackTrust(own_uid=5, find_uid=lambda peer, server: 5)
        self.app = create_app(self.service, threads=self.threads, trust=trust, idle_seconds=0.1)
        self.place = place

    def peer(self) -> Peer:
        return Peer(self.app)

    def leftovers(self) -> list[Path]:
        return list(self.place.rglob(".writing-*"))

    async def metric(self, name: str) -> float:
        peer = self.peer()
        await peer.ask("GET", "/metrics")
        lines = peer.body.decode().splitlines()
        return float(next((line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)), "0"))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    opened = House(tmp_path / "data")
    yield opened
    opened.threads.shutdown()
    opened.service.close()


def _pieces(entry: Entry, size_bytes: int = 100_000) -> list[bytes]:
    raw = bytes(entry.buffer)
    return [raw[i : i + size_bytes] for i in range(0, len(raw), size_bytes)]


def test_a_put_and_a_get(house: House) -> None:
    async def run() -> None:
        assert await house.peer().put(_LARGE, *_pieces(_LARGE)) == 201
        for _ in range(2):
            peer = house.peer()
            assert await peer.get(_LARGE) == 200
            assert peer.body == bytes(_LARGE.buffer)
            assert len(peer.messages) > 4  # in pieces

    asyncio.run(run())


def test_a_peer_that_stalls_in_a_body_is_told_and_leaves_nothing(house: House) -> None:
    async def run() -> None:
        peer = house.peer()
        assert await peer.put(_LARGE, *_pieces(_LARGE)[:3], _STALL) == 408
        assert json.loads(peer.body)["kind"] == "timeout"
        assert (b"connection", b"close") in peer.messages[0]["headers"]
        assert house.leftovers() == []
        assert await house.peer().get(_LARGE) == 404
        assert await house.peer().ask("POST", "/v1/default/lookup", _STALL, headers={"Content-Length": "9"}) == 408

    asyncio.run(run())


def test_a_peer_that_goes_away_leaves_nothing(house: House) -> None:
    async def run() -> None:
        peer = house.peer()
        assert await peer.put(_LARGE, *_pieces(_LARGE)[:3], _GONE) == 0
        assert peer.messages == []
        assert house.leftovers() == []
        assert await house.metric("torchtpu_cache_service_uploads_running") == 0

    asyncio.run(run())


def test_a_cancelled_put_leaves_nothing(house: House) -> None:
    async def run() -> None:
        for pieces in range(1, 7):
            peer = house.peer()
            task = asyncio.create_task(peer.put(_LARGE, *_pieces(_LARGE)[:5], _STALL))
            while peer.asked_for < pieces:  # noqa: ASYNC110 - what is awaited tells nobody
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.to_thread(house.threads.submit(lambda: None).result)

    asyncio.run(run())
    house.threads.shutdown()
    assert house.leftovers() == []


def test_a_peer_that_takes_no_byte_is_dropped(house: House) -> None:
    async def run() -> None:
        await house.peer().put(_LARGE, *_pieces(_LARGE))
        peer = house.peer()
        peer.takes_bytes = False
        with pytest.raises(TimeoutError):
            await peer.get(_LARGE)

    asyncio.run(run())


def test_the_loop_lives_while_the_disk_sleeps(house: House) -> None:
    """A thread that hangs in the disk keeps nobody else from an answer."""
    stuck, release = threading.Event(), threading.Event()

    def hang() -> None:
        stuck.set()
        release.wait(30)

    async def run() -> None:
        await house.peer().put(_LARGE, *_pieces(_LARGE))
        await house.peer().get(_LARGE)
        hung = [house.threads.submit(hang) for _ in range(4)]
        assert await asyncio.to_thread(stuck.wait, 10)
        try:
            async with asyncio.timeout(10):
                assert await house.peer().ask("GET", "/healthz") == 200
                assert await house.peer().get(_LARGE) == 200  # known and in the page cache: no thread needed
        finally:
            release.set()
        assert all(future.result() is None for future in hung)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("error", "put_status", "kind"),
    [(errno.EIO, 503, "io"), (errno.ENOSPC, 507, "full"), (errno.EACCES, 500, "forbidden")],
)
def test_failing_storage_is_no_miss_and_is_counted(house: House, error: int, put_status: int, kind: str) -> None:
    async def run() -> None:
        assert await house.peer().put(_LARGE, *_pieces(_LARGE)) == 201
        faults = [Fault(call=call, error=error) for call in ("read", "write")]
        with house.files.failing(*faults):
            peer = house.peer()
            assert await peer.put(entry_for("in vain"), bytes(entry_for("in vain").buffer)) == put_status
            assert str(house.place) not in peer.body.decode()
            assert house.leftovers() == []
            if error != errno.ENOSPC:
                house.service._hot.drop((DEFAULT_NAMESPACE, _LARGE.key))
                assert await house.peer().get(_LARGE) == put_status
                assert await house.metric('torchtpu_cache_service_reads_total{outcome="error"}') == 1
                assert await house.metric(f'torchtpu_cache_service_failures_total{{kind="{kind}"}}') == 2
            assert await house.metric('torchtpu_cache_service_reads_total{outcome="miss"}') == 0
        assert await house.peer().get(_LARGE) == 200

    asyncio.run(run())


def test_steady_failures_make_it_unready_until_it_works_again(house: House) -> None:
    async def run() -> None:
        assert await house.peer().ask("GET", "/readyz") == 200
        with house.files.failing(Fault(call="scandir", error=errno.EIO)):
            for i in range(5):
                assert await house.peer().get(entry_for(f"unreadable {i}")) == 503
        peer = house.peer()
        assert await peer.ask("GET", "/readyz") == 503
        assert await house.peer().ask("GET", "/healthz") == 200
        house.clock.advance(31)
        assert await house.peer().ask("GET", "/readyz") == 200

    asyncio.run(run())


def test_what_nobody_expected_is_logged_and_not_told(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def burst(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(house.service, "open", burst)
    monkeypatch.setattr(house.service, "page", lambda *a, **k: burst())

    async def run() -> None:
        for path in (wire.entry_path(DEFAULT_NAMESPACE, _LARGE.key), "/v1/default/entries"):
            caplog.clear()
            peer = house.peer()
            assert await peer.ask("GET", path) == 500
            assert "secret" not in peer.body.decode()
            assert "secret detail" in caplog.text
            request_id = json.loads(peer.body)["detail"].rsplit(" ", 1)[1]
            assert request_id in caplog.text

    asyncio.run(run())


def test_what_the_disk_refuses_is_one_line_of_the_log(house: House, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        with house.files.failing(Fault(call="open", error=errno.EROFS)):
            assert await house.peer().put(_LARGE, *_pieces(_LARGE)) == 507

    asyncio.run(run())
    [record] = caplog.records
    assert record.exc_info is None
    assert os.strerror(errno.EROFS) in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_delete_of_a_peer_that_is_gone_does_nothing(house: House) -> None:
    """Its port may be another process's by the time the kernel is asked who writes."""

    async def run() -> None:
        assert await house.peer().put(_LARGE, *_pieces(_LARGE)) == 201
        assert await house.peer().ask("DELETE", wire.entry_path(DEFAULT_NAMESPACE, _LARGE.key), _GONE) == 0
        assert await house.peer().get(_LARGE) == 200

    asyncio.run(run())


def test_a_writer_of_whom_nothing_can_be_known_now_may_come_again(house: House) -> None:
    def find(peer: object, server: object) -> int | None:
        raise OSError(errno.EMFILE, "no descriptor left")

    app = create_app(house.service, threads=house.threads, trust=LoopbackTrust(own_uid=5, find_uid=find))

    async def run() -> None:
        peer = Peer(app)
        assert await peer.put(_LARGE, *_pieces(_LARGE)) == 503
        assert json.loads(peer.body)["kind"] == "io"

    asyncio.run(run())


@pytest.mark.parametrize("uid", [None, 6, 0])
def test_writers_must_be_ours(house: House, uid: int | None) -> None:
    asked = []

    def find(peer: object, server: object) -> int | None:
        asked.append((peer, server))
        return uid

    app = create_app(house.service, threads=house.threads, trust=LoopbackTrust(own_uid=5, find_uid=find))

    async def run() -> None:
        assert await Peer(app).put(_LARGE, *_pieces(_LARGE)) == 403
        path = wire.entry_path(DEFAULT_NAMESPACE, _LARGE.key)
        assert await Peer(app).ask("DELETE", path) == 403
        assert await Peer(app).ask("POST", "/v1/default/anything-new") == 403
        assert asked == [(("127.0.0.1", 1), ("127.0.0.1", 2))] * 3
        assert await Peer(app).ask("GET", path) == 404
        assert (
            await Peer(app).ask("POST", "/v1/default/lookup", b'{"keys": []}', headers={"Content-Length": "12"}) == 200
        )

    asyncio.run(run())
