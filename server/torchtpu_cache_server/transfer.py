"""Large blobs on their way to one socket by sendfile: the kernel moves the bytes, the event loop moves on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from torchtpu_cache_server.blobs.bucket import OpenObject
from torchtpu_cache_server.entries_asgi import read_at_hand

STEP_BYTES: Final = 2 << 20
SHORT_STEP_BYTES: Final = 512 << 10
_SHORT_SECONDS: Final = 0.1
_FRESH_SECONDS: Final = 1.0


class Pace:
    """How much one turn of the event loop may send of one large blob, so that one fast reader starves nobody.

    Large steps cost less, and while there were short requests lately, each waits for a step of each transfer.
    """

    def __init__(self) -> None:
        self._short_at = float("-inf")

    def note_short(self, now: float) -> None:
        """There was a request that was not for a large blob."""
        self._short_at = now

    def step_bytes(self, now: float) -> int:
        return SHORT_STEP_BYTES if now - self._short_at < _SHORT_SECONDS else STEP_BYTES


class Transfer:
    """Sends heads with blobs, one after another. It belongs to the event loop; nothing else may write meanwhile.

    A step whose first, middle or last page is not in the page cache is read in a thread first, unless all of the blob
    was sent within the last second. The kernel drops pages in runs; where one is missing all the same, the event loop
    waits for the disk.

    Args:
        sock: non-blocking; it stays the caller's, who closes it after `end`.
        pace: shared by all transfers of the event loop.
        idle_seconds: how long the peer may take no byte.
        ended: called once for each `begin`, with whether all was sent.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        pace: Pace,
        loop: asyncio.AbstractEventLoop,
        threads: Executor,
        idle_seconds: float,
        ended: Callable[[bool], None],
    ) -> None:
        self._pace = pace
        self._socket = sock
        self._descriptor = sock.fileno()
        self._loop = loop
        self._threads = threads
        self._idle_seconds = idle_seconds
        self._call_ended = ended
        self._head: bytes | memoryview = b""
        self._blob: OpenObject | None = None
        self._offset = 0
        self._moved_at = 0.0
        self._is_watching = False
        self._is_fetching = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        return self._blob is not None

    def begin(self, head: bytes, blob: OpenObject) -> None:
        """Begins to send a head and a blob with a descriptor, which it closes."""
        self._head, self._blob, self._offset = head, blob, 0
        self._moved_at = self._loop.time()
        self._cork(True)
        self._step()

    def end(self, *, complete: bool = False) -> None:
        """Stops; what was not sent by now never is. Without effect where nothing is sent."""
        blob, self._blob = self._blob, None
        if blob is None:
            return
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._is_fetching:
            blob.close()
        self._call_ended(complete)

    def _step(self) -> None:
        """Sends what one turn may, and has itself called again until the end."""
        blob = self._blob
        if blob is None or self._is_fetching:
            return
        size_bytes = min(self._pace.step_bytes(self._moved_at), blob.size_bytes - self._offset)
        try:
            at_hand = self._moved_at - blob.sent_at < _FRESH_SECONDS or _has_at_hand(blob, self._offset, size_bytes)
        except OSError:
            self.end()
            return
        if at_hand:
            self._send(blob, size_bytes)
        else:
            self._fetch(blob, size_bytes)

    def _send(self, blob: OpenObject, size_bytes: int) -> None:
        assert blob.descriptor is not None
        try:
            if self._head:
                self._head = memoryview(self._head)[self._socket.send(self._head) :]
            sent = 0 if self._head else os.sendfile(self._descriptor, blob.descriptor, self._offset, size_bytes)
        except BlockingIOError:
            self._watch()
            return
        except OSError:
            self.end()
            return
        if not sent and not self._head:
            self.end()  # the file became shorter
            return
        self._offset += sent
        self._moved_at = self._loop.time()
        if self._offset >= blob.size_bytes:
            blob.sent_at = self._moved_at
            self._cork(False)
            self.end(complete=True)
        elif sent < size_bytes:
            self._watch()
        elif not self._is_watching:
            self._loop.call_soon(self._step)

    def _cork(self, is_corked: bool) -> None:
        """Has the kernel send full packets only, which costs it a tenth less than packets that end with each write."""
        # A connection that is gone by now fails at the next write.
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, is_corked)

    def _fetch(self, blob: OpenObject, size_bytes: int) -> None:
        """Has a thread bring a piece into the page cache."""
        self._unwatch()
        self._is_fetching = True
        job = self._loop.run_in_executor(self._threads, blob.read_at, self._offset, size_bytes)
        job.add_done_callback(functools.partial(self._has_fetched, blob, size_bytes))

    def _has_fetched(self, blob: OpenObject, size_bytes: int, job: asyncio.Future[bytes]) -> None:
        self._is_fetching = False
        failed = job.cancelled() or job.exception() is not None
        if self._blob is None:
            blob.close()
        elif failed:
            self.end()
        else:
            self._send(blob, size_bytes)  # also where the file system keeps no pages

    def _watch(self) -> None:
        """Steps whenever the socket takes more; once begun it goes on, since each change costs a system call."""
        if not self._is_watching:
            self._is_watching = True
            self._loop.add_writer(self._descriptor, self._step)
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_seconds, self._end_if_idle)

    def _unwatch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._loop.remove_writer(self._descriptor)

    def _end_if_idle(self) -> None:
        left_seconds = self._moved_at + self._idle_seconds - self._loop.time()
        if left_seconds > 0 or self._is_fetching:
            self._timer = self._loop.call_later(max(left_seconds, 1.0), self._end_if_idle)
        else:
            self.end()


def _has_at_hand(blob: OpenObject, offset: int, size_bytes: int) -> bool:
    """Whether the page cache has the first, middle and last byte of a step."""
    return bool(
        read_at_hand(blob, offset, 1)
        and read_at_hand(blob, offset + size_bytes // 2, 1)
        and read_at_hand(blob, offset + size_bytes - 1, 1)
    )
