"""A large blob on its way to one socket by sendfile: the kernel moves the bytes, the event loop moves on."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from torchtpu_cache_server.blobs.bucket import OpenObject
from torchtpu_cache_server.entries_asgi import read_at_hand

STEP_BYTES: Final = 1 << 20
"""What one turn of the event loop may send, so that one fast reader starves nobody."""

_FRESH_SECONDS: Final = 1.0


class Transfer:
    """Sends a head and a blob, which it closes. It belongs to the event loop; nothing else may write to the socket.

    A step whose first, middle or last page is not in the page cache is read in a thread first, unless all of the blob
    was sent within the last second. The kernel drops pages in runs; where one is missing all the same, the event loop
    waits for the disk.

    Args:
        sock: non-blocking; it stays the caller's, open until `ended` was called.
        blob: one with a descriptor.
        idle_seconds: how long the peer may take no byte.
        ended: called once, with whether all was sent.
    """

    def __init__(
        self,
        sock: socket.socket,
        head: bytes,
        blob: OpenObject,
        *,
        loop: asyncio.AbstractEventLoop,
        threads: Executor,
        idle_seconds: float,
        ended: Callable[[bool], None],
    ) -> None:
        assert blob.descriptor is not None
        self._socket = sock
        self._head = memoryview(head)
        self._blob = blob
        self._descriptor = blob.descriptor
        self._offset = 0
        self._loop = loop
        self._threads = threads
        self._idle_seconds = idle_seconds
        self._call_ended: Callable[[bool], None] | None = ended
        self._is_watching = False
        self._is_fetching = False
        self._moved_at = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def step(self) -> None:
        """Sends what one turn may, and has itself called again until the end."""
        if self._call_ended is None or self._is_fetching:
            return
        size_bytes = min(STEP_BYTES, self._blob.size_bytes - self._offset)
        try:
            at_hand = self._has_at_hand(size_bytes)
        except OSError:
            self.end()
            return
        if at_hand:
            self._send(size_bytes)
        else:
            self._fetch(size_bytes)

    def end(self, *, complete: bool = False) -> None:
        """Stops; what was not sent by now never is."""
        call_ended, self._call_ended = self._call_ended, None
        if call_ended is None:
            return
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_fetching:
            self._blob.close()
        call_ended(complete)

    def _has_at_hand(self, size_bytes: int) -> bool:
        if self._moved_at - self._blob.sent_at < _FRESH_SECONDS:
            return True
        first = self._offset
        return bool(
            read_at_hand(self._blob, first, 1)
            and read_at_hand(self._blob, first + size_bytes // 2, 1)
            and read_at_hand(self._blob, first + size_bytes - 1, 1)
        )

    def _send(self, size_bytes: int) -> None:
        try:
            if self._head:
                # Held back until the first bytes of the blob fill the packet.
                self._head = self._head[self._socket.send(self._head, socket.MSG_MORE) :]
            sent = 0 if self._head else os.sendfile(self._socket.fileno(), self._descriptor, self._offset, size_bytes)
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
        if self._offset >= self._blob.size_bytes:
            self._blob.sent_at = self._moved_at
            self.end(complete=True)
        elif sent < size_bytes:
            self._watch()
        elif not self._is_watching:
            self._loop.call_soon(self.step)

    def _fetch(self, size_bytes: int) -> None:
        """Has a thread bring a piece into the page cache."""
        self._unwatch()
        self._is_fetching = True
        job = self._loop.run_in_executor(self._threads, self._blob.read_at, self._offset, size_bytes)
        job.add_done_callback(functools.partial(self._has_fetched, size_bytes))

    def _has_fetched(self, size_bytes: int, job: asyncio.Future[bytes]) -> None:
        self._is_fetching = False
        failed = job.cancelled() or job.exception() is not None
        if self._call_ended is None:
            self._blob.close()
        elif failed:
            self.end()
        else:
            self._send(size_bytes)  # also where the file system keeps no pages

    def _watch(self) -> None:
        """Steps whenever the socket takes more; once begun it goes on, since each change costs a system call."""
        if not self._is_watching:
            self._is_watching = True
            self._loop.add_writer(self._socket.fileno(), self.step)
        if self._timer is None:
            self._timer = self._loop.call_later(self._idle_seconds, self._end_if_idle)

    def _unwatch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._loop.remove_writer(self._socket.fileno())

    def _end_if_idle(self) -> None:
        left_seconds = self._moved_at + self._idle_seconds - self._loop.time()
        if left_seconds > 0 or self._is_fetching:
            self._timer = self._loop.call_later(max(left_seconds, 1.0), self._end_if_idle)
        else:
            self.end()
