"""Heads that are known: the same answer as the ordinary way's, or the ordinary way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import StoreUnavailable
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for, rival_of
from torchtpu_cache_core.wire import entry_path
from torchtpu_cache_server import transfer
from torchtpu_cache_server.admission import Limits
from torchtpu_cache_server.app import create_app
from torchtpu_cache_server.blobs.bucket import OpenObject
from torchtpu_cache_server.blobs.files import FileBucket
from torchtpu_cache_server.blobs.layout import blob_name
from torchtpu_cache_server.entries_asgi import PIECE_BYTES
from torchtpu_cache_server.express import Express, ExpressProtocol
from torchtpu_cache_server.hot import Hot, SharedObject
from torchtpu_cache_server.index.sqlite import SqliteIndex
from torchtpu_cache_server.service import Service
from torchtpu_cache_server.transfer import Pace, Transfer
from torchtpu_cache_server.upkeep import reconcile

_SMALL = entry_for("small")
_LARGE = entry_for("large", size_bytes=6 << 20)
_TALK_SECONDS = 20
SOON_SECONDS = 2.5  # a connection that is quiet is closed after 5


class Answer:
    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status = status
        self.headers = [header for header in headers if header[0] != "date"]
        self.body = body


class Talk:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip().split("\r\n")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        body = await self.reader.readexactly(int(dict(headers).get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    async def ask(self, data: bytes) -> Answer:
        self.send(data)
        return await self.answer()


class Heard(ExpressProtocol):
    """Counts what arrives, so that a test knows when it did."""

    heard_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        Heard.heard_bytes += len(data)


class Site:
    """A service that listens, in this process."""

    def __init__(self, place: Path, **config: Any) -> None:
        self.service = Service(FileBucket(place), SqliteIndex(place / "index.sqlite"), limits=Limits(min_free_bytes=0))
        reconcile(self.service)
        self.threads = ThreadPoolExecutor(4)
        self.app = create_app(self.service, threads=self.threads, idle_seconds=0.3)
        self.express = Express(self.app.edge)
        self.ordinary = 0
        self.connections: set[Any] = set()
        self._talks: list[Talk] = []
        self._config = uvicorn.Config(self.app, ws="none", lifespan="off", log_config=None, **config)
        self._entries = self.app._entries
        self.app._entries = self._count  # type: ignore[assignment]

    async def _count(self, *arguments: Any) -> None:
        self.ordinary += 1
        await self._entries(*arguments)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Site]:
        self._config.load()
        state = ServerState()
        self.connections = state.connections  # type: ignore[assignment]
        make = functools.partial(Heard, self.express, self._config, state, {})
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        server = await asyncio.get_running_loop().create_server(make, sock=listener)
        try:
            async with server, asyncio.timeout(_TALK_SECONDS):
                yield self
        finally:
            for talk in self._talks:
                talk.writer.transport.abort()
                with contextlib.suppress(OSError):
                    await talk.writer.wait_closed()
            await until(lambda: not self.connections)
            self.threads.shutdown()
            self.service.close()

    async def talk(self, *, takes_little: bool = False) -> Talk:
        """A connection; one that takes little holds the service up until somebody reads."""
        sock = socket.socket()
        if takes_little:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        talk = Talk(*await asyncio.open_connection(sock=sock, limit=1 << (10 if takes_little else 18)))
        self._talks.append(talk)
        return talk

    async def known(self, entry: Entry) -> Talk:
        """A connection on which the head of this entry is known, and its blob open."""
        talk = await self.talk()
        for _ in range(2):
            assert (await talk.ask(head_of(entry))).body == bytes(entry.buffer)
        self.ordinary = 0
        return talk

    @property
    def transfers(self) -> list[Transfer]:
        transfers = (connection._transfer for connection in self.connections)
        return [transfer for transfer in transfers if transfer is not None and transfer.is_running]

    async def stalled(self, entry: Entry) -> Talk:
        """A connection with a transfer that cannot go on until somebody reads."""
        if head_of(entry) not in self.express._known:
            await self.known(entry)
        talk = await self.talk(takes_little=True)
        talk.send(head_of(entry))
        await until(lambda: bool(self.transfers))
        return talk


async def deliver(talk: Talk, data: bytes) -> None:
    """Sends, and waits until the service has it, so that what is sent next arrives by itself."""
    before = Heard.heard_bytes
    talk.send(data)
    await until(lambda: Heard.heard_bytes - before >= len(data))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - what is awaited tells nobody
        await asyncio.sleep(0.01)


def head_of(entry: Entry, *lines: str, method: str = "GET", version: str = "1.1") -> bytes:
    path = entry_path(DEFAULT_NAMESPACE, entry.key)
    return "\r\n".join((f"{method} {path} HTTP/{version}", "Host: localhost", *lines, "", "")).encode()


def run(place: Path, test: Callable[[Site], Coroutine[Any, Any, None]], *entries: Entry, **config: Any) -> None:
    async def main() -> None:
        site = Site(place, **config)
        for entry in entries:
            site.service.put(DEFAULT_NAMESPACE, entry)
        async with site.open():
            await test(site)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("size_bytes", [2000, 200_000, 300_000, 6 << 20])
def test_a_known_head_gets_the_same_answer_without_asgi(tmp_path: Path, size_bytes: int) -> None:
    entry = entry_for("any", size_bytes=size_bytes)

    async def test(site: Site) -> None:
        talk = await site.talk()
        first = await talk.ask(head_of(entry))
        assert (first.status, first.body, site.ordinary) == (200, bytes(entry.buffer), 1)
        for again in (talk, talk, await site.talk()):
            answer = await again.ask(head_of(entry))
            assert (answer.status, answer.headers, answer.body) == (200, first.headers, first.body)
        assert site.ordinary == 1
        sockets = [connection._socket for connection in site.connections if connection._socket is not None]
        assert len(sockets) == (2 if size_bytes > PIECE_BYTES else 0)
        assert not any(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) for sock in sockets)
        shown = (await talk.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")).body.decode()
        assert 'reads_total{outcome="hit"} 4.0' in shown
        assert 'requests_total{method="GET",route="entry",status="200"} 4.0' in shown
        sent_bytes = shown.partition("\ntorchtpu_cache_service_sent_bytes_total ")[2].split()[0]
        assert float(sent_bytes) == 4 * entry.size_bytes

    run(tmp_path, test, entry)


def test_a_delete_and_a_new_entry_are_seen_at_once(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.known(_SMALL)
        assert site.service.delete(DEFAULT_NAMESPACE, _SMALL.key)
        assert (await talk.ask(head_of(_SMALL))).status == 404
        assert not site.express._known
        rival = rival_of(_SMALL)
        site.service.put(DEFAULT_NAMESPACE, rival)
        for _ in range(2):
            assert (await talk.ask(head_of(_SMALL))).body == bytes(rival.buffer)
        assert site.ordinary == 2

    run(tmp_path, test, _SMALL)


@pytest.mark.parametrize("entry", [_SMALL, _LARGE], ids=["small", "large"])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_blob_is_never_sent(tmp_path: Path, entry: Entry, in_place: bool, is_open: bool) -> None:
    async def test(site: Site) -> None:
        talk = await site.known(entry)
        if not is_open:
            site.service._hot = Hot(max_open=0)
            assert (await talk.ask(head_of(entry))).status == 200
        path = site.service.bucket.path(blob_name(entry.digest))  # type: ignore[attr-defined]
        damaged = bytearray(entry.buffer)
        damaged[-1] ^= 1
        if in_place:
            with path.open("r+b") as file:
                file.write(damaged)
        else:
            (tmp_path / "new").write_bytes(damaged)
            (tmp_path / "new").replace(path)
        assert (await talk.ask(head_of(entry))).status == 500
        assert (await talk.ask(head_of(entry))).status == 404

    run(tmp_path, test, entry)


def test_a_lost_blob_is_no_hit(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.known(_SMALL)
        site.service.bucket.path(blob_name(_SMALL.digest)).unlink()  # type: ignore[attr-defined]
        assert (await talk.ask(head_of(_SMALL))).status == 500

    run(tmp_path, test, _SMALL)


@pytest.mark.parametrize(
    ("data", "answers"),
    [
        (head_of(_SMALL, f'If-None-Match: "{"0" * 64}"'), [200]),
        (head_of(_SMALL, f'If-None-Match: "{_SMALL.digest}"'), [304]),
        (head_of(_SMALL, "Connection: close"), [200]),
        (head_of(_SMALL, "Connection: upgrade", "Upgrade: websocket"), [200]),
        (head_of(_SMALL, version="1.0"), [200]),
        (head_of(_SMALL, "Origin: http://elsewhere"), [403]),
        (head_of(_SMALL).replace(b"localhost", b"elsewhere"), [421]),
        (head_of(_SMALL, "X: " + "x" * 1024), [200]),
        (head_of(_SMALL) + head_of(_SMALL), [200, 200]),
        (head_of(_SMALL, "Content-Length: 2") + b"\r\n", [200]),
        (head_of(entry_for("absent")), [404]),
    ],
)
def test_what_is_more_than_a_plain_hit_goes_the_ordinary_way(tmp_path: Path, data: bytes, answers: list[int]) -> None:
    async def test(site: Site) -> None:
        await site.known(_SMALL)
        for _ in range(3):
            talk = await site.talk()
            talk.send(data)
            assert [(await talk.answer()).status for _ in answers] == answers
        assert list(site.express._known) == [head_of(_SMALL)]

    run(tmp_path, test, _SMALL)


def test_what_looks_like_a_known_head_inside_another_message_is_none(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await site.known(_SMALL)
        known = head_of(_SMALL)
        body = b"POST /v1/default/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(known)
        for first in (body, known + body, known + known + body):
            talk = await site.talk()
            await deliver(talk, first)
            talk.send(known)
            for _ in range(first.count(known)):
                assert (await talk.answer()).status == 200
            assert (await talk.answer()).status == 400  # no JSON
            assert (await talk.ask(known)).status == 200
        for first in (known + b"GET / HTTP/1.1\r\nA-Head: ", b"GET / HTTP/1.1\r\nA-Head: "):
            talk = await site.talk()
            await deliver(talk, first)
            talk.send(known)
            for _ in range(first.count(known)):
                assert (await talk.answer()).status == 200
            assert ("content-type", "text/html; charset=utf-8") in (await talk.answer()).headers
            assert (await talk.ask(known)).body == bytes(_SMALL.buffer)

    run(tmp_path, test, _SMALL)


def test_heads_sent_ahead_are_answered_in_order(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await site.known(_SMALL)
        talk = await site.known(_LARGE)
        asked = [_LARGE, _SMALL, _LARGE, _LARGE, _SMALL, _SMALL]
        for entry in asked:
            await deliver(talk, head_of(entry))
        for entry in asked:
            assert (await talk.answer()).body == bytes(entry.buffer)

    run(tmp_path, test, _SMALL, _LARGE)


def test_what_is_sent_ahead_of_a_transfer_is_bounded(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.stalled(_LARGE)
        talk.send(b"GET /" + b"x" * 700_000)
        await until(lambda: any(not connection.transport.is_reading() for connection in site.connections))
        assert max(len(connection._held) for connection in site.connections) < 400_000
        assert (await talk.answer()).body == bytes(_LARGE.buffer)
        assert (await talk.answer()).status == 431

    run(tmp_path, test, _LARGE)


def test_a_slow_reader_gets_all_of_it_and_delays_nobody(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        slow = await site.stalled(_LARGE)
        quick = await site.known(_SMALL)
        body = bytearray(await slow.reader.readuntil(b"\r\n\r\n"))[:0]
        while len(body) < _LARGE.size_bytes:
            body += await slow.reader.read(100_000)
            assert (await quick.ask(head_of(_SMALL))).status == 200
        assert body == _LARGE.buffer
        assert (await slow.ask(head_of(_SMALL))).status == 200
        assert site.ordinary == 0

    run(tmp_path, test, _SMALL, _LARGE)


def test_a_peer_that_takes_nothing_loses_its_connection(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.stalled(_LARGE)
        async with asyncio.timeout(SOON_SECONDS):
            await until(lambda: not site.transfers)
            assert len(await talk.reader.read()) < _LARGE.size_bytes

    run(tmp_path, test, _LARGE)


def test_a_peer_that_leaves_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        await site.known(_LARGE)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            talk = await site.stalled(_LARGE)
            (left,) = site.transfers
            talk.writer.transport.abort()
            await until(lambda: not left.is_running)  # noqa: B023 - called before the next round
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

    run(tmp_path, test, _LARGE)


def test_a_service_without_descriptors_sends_large_blobs_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def test(site: Site) -> None:
        await site.known(_LARGE)
        monkeypatch.setattr(os, "dup", dup)
        assert (await (await site.talk()).ask(head_of(_LARGE))).body == bytes(_LARGE.buffer)
        assert site.ordinary == 1

    run(tmp_path, test, _LARGE)


def test_what_the_page_cache_has_lost_is_read_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def have_not(blob: OpenObject, offset: int, size_bytes: int) -> None:
        asked.append(offset)

    monkeypatch.setattr(transfer, "read_at_hand", have_not)
    monkeypatch.setattr(Pace, "step_bytes", lambda *_: 1 << 20)

    async def test(site: Site) -> None:
        talk = await site.known(_LARGE)
        steps = list(range(0, _LARGE.size_bytes, 1 << 20))
        assert asked == steps
        monkeypatch.setattr(transfer, "_FRESH_SECONDS", 60.0)
        assert (await talk.ask(head_of(_LARGE))).body == bytes(_LARGE.buffer)
        assert asked == steps  # all of it was just sent
        monkeypatch.setattr(transfer, "_FRESH_SECONDS", 0.0)
        assert (await talk.ask(head_of(_LARGE))).body == bytes(_LARGE.buffer)
        assert asked == steps * 2
        assert site.ordinary == 0

    run(tmp_path, test, _LARGE)


def test_steps_are_short_while_there_are_short_requests() -> None:
    pace = Pace()
    assert pace.step_bytes(5.0) == transfer.STEP_BYTES
    pace.note_short(5.0)
    assert pace.step_bytes(5.05) == transfer.SHORT_STEP_BYTES
    assert pace.step_bytes(5.2) == transfer.STEP_BYTES


def test_a_disk_that_fails_in_the_middle_breaks_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "read_at_hand", lambda *_: None)
    monkeypatch.setattr(transfer, "_FRESH_SECONDS", 0.0)

    async def test(site: Site) -> None:
        talk = await site.known(_LARGE)

        def fail(*_: object) -> bytes:
            raise StoreUnavailable("the disk is gone")

        monkeypatch.setattr(SharedObject, "read_at", fail)
        talk.send(head_of(_LARGE))
        assert await talk.reader.read() == b""

    run(tmp_path, test, _LARGE)


def test_a_file_that_is_cut_in_the_middle_breaks_the_connection(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.stalled(_LARGE)
        os.truncate(site.service.bucket.path(blob_name(_LARGE.digest)), 5 << 20)  # type: ignore[attr-defined]
        assert len(await talk.reader.read()) < _LARGE.size_bytes

    run(tmp_path, test, _LARGE)


def test_an_entry_that_is_deleted_in_the_middle_is_sent_to_its_end(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.stalled(_LARGE)
        site.service.delete(DEFAULT_NAMESPACE, _LARGE.key)
        assert (await talk.answer()).body == bytes(_LARGE.buffer)
        assert (await talk.ask(head_of(_LARGE))).status == 404

    run(tmp_path, test, _LARGE)


def test_the_end_of_the_service_waits_for_a_transfer(tmp_path: Path) -> None:
    async def test(site: Site) -> None:
        talk = await site.stalled(_LARGE)
        for connection in list(site.connections):
            connection.shutdown()
        assert (await talk.answer()).body == bytes(_LARGE.buffer)
        async with asyncio.timeout(SOON_SECONDS):
            assert await talk.reader.read() == b""

    run(tmp_path, test, _LARGE)


@pytest.mark.parametrize("entry", [_SMALL, _LARGE], ids=["small", "large"])
def test_a_quiet_connection_is_closed_and_a_busy_one_not(tmp_path: Path, entry: Entry) -> None:
    async def test(site: Site) -> None:
        talk = await site.known(entry)
        for _ in range(12):
            await asyncio.sleep(0.1)
            assert (await talk.ask(head_of(entry))).status == 200
        assert site.ordinary == 0
        assert await talk.reader.read() == b""

    run(tmp_path, test, entry, timeout_keep_alive=1.0)


def test_few_files_stay_open_and_each_for_as_long_as_it_is_read(tmp_path: Path) -> None:
    entries = [entry_for(f"entry {number}") for number in range(6)]

    def open_files() -> int:
        links = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        return sum(str(tmp_path / "blobs") in link for link in links)

    with Service(FileBucket(tmp_path), SqliteIndex(tmp_path / "index.sqlite")) as service:
        service._hot = Hot(max_verified=5, max_open=3)
        for entry in entries:
            service.put(DEFAULT_NAMESPACE, entry)
            found = service.open(DEFAULT_NAMESPACE, entry.key)
            assert found is not None
            found.close()
        assert service.open_hot(DEFAULT_NAMESPACE, entries[0].key) is None
        held = service.open_hot(DEFAULT_NAMESPACE, entries[1].key)
        for entry in entries[1:] * 2:
            assert service.open_hot(DEFAULT_NAMESPACE, entry.key) is not None
        assert open_files() == 4
        assert service.delete(DEFAULT_NAMESPACE, entries[5].key)
        assert open_files() == 3
        assert held is not None
        assert held.blob.read_at(0, 1 << 20) == bytes(entries[1].buffer)
        del held
        assert open_files() == 2
        for entry in entries[1:5] * 2:
            assert service.open_hot(DEFAULT_NAMESPACE, entry.key) is not None
        assert open_files() == 3
    assert open_files() == 0


def test_heads_of_what_is_gone_are_not_held(tmp_path: Path) -> None:
    entries = [entry_for(str(number), size_bytes=2000) for number in range(20)]

    async def test(site: Site) -> None:
        for entry in entries:
            await site.known(entry)
        assert len(site.express._known) == 20
        for entry in entries[:15]:
            site.service.delete(DEFAULT_NAMESPACE, entry.key)
        gc.collect()
        assert len(site.express._known) == 5

    run(tmp_path, test, *entries)
