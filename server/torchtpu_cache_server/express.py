"""Hits answered without ASGI: what a head came to once, the same bytes come to again.

A head that the ordinary way has parsed, judged and answered with an entry is remembered by its bytes. The same bytes on
any connection ask for the same entry, and are answered from the protocol itself: parser, task and messages cost more
than a small hit, and more than a large one leaves over beside a server that is written in C. Whatever is not so goes
the ordinary way (`entries_asgi`), which is spared here and never replaced:

- Nothing here judges a request. Remembered is a head that was all that arrived, and one whole message.
- Whether there is such an entry is asked each time: a delete, an eviction and a changed file are seen at once.
- What takes a wait for the disk is not answered here; in the middle of a large blob, a thread waits.

So what a read may have must follow from its head alone. Where that ends, as with tokens that end, heads have to be
forgotten with it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, cast
from weakref import WeakValueDictionary

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from torchtpu_cache_core.errors import CacheError
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_server.edge import Edge
from torchtpu_cache_server.entries_asgi import PIECE_BYTES, REMEMBER, found_headers, read_at_hand
from torchtpu_cache_server.index.base import EntryName
from torchtpu_cache_server.protocol import BoundedProtocol
from torchtpu_cache_server.service import OpenEntry
from torchtpu_cache_server.transfer import Pace, Transfer

Pairs = Sequence[tuple[bytes, bytes]]

_MAX_HEADS: Final = 4096  # about 700 bytes each
_MAX_HEAD_BYTES: Final = 1024
_MAX_HELD_BYTES: Final = 64 << 10
_BEGINNING: Final = b"GET /v1/"
_END: Final = b"\r\n\r\n"


class _Known:
    """What a head asks for, and the lines of the answer that are the entry's."""

    __slots__ = ("__weakref__", "lines", "manifest", "name")

    def __init__(self, name: EntryName) -> None:
        self.name = name
        self.manifest: Manifest | None = None
        self.lines = b""


class Express:
    """What connections share: the heads that are known, and the service that they ask. For the event loop only."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.pace = Pace()
        # Each lives as long as its entry is hot, so that no head of what is gone is held.
        self._known: WeakValueDictionary[bytes, _Known] = WeakValueDictionary()
        self._defaults: Pairs | None = None
        self._beginning = b""

    def remember(self, head: bytes, name: EntryName) -> None:
        """A head was answered with this entry, in full and for no other reason than what stands in it."""
        if len(self._known) >= _MAX_HEADS:
            self._known.pop(next(iter(self._known), b""), None)
        known = _Known(name)
        if self.edge.service.attach(*name, known):
            self._known[head] = known

    def find(self, head: bytes, defaults: Pairs) -> tuple[OpenEntry, bytes] | None:
        """The entry that a head asks for, and the head of the answer; None where the ordinary way has to say.

        Args:
            defaults: the server's own headers.
        """
        known = self._known.get(head)
        if known is None:
            return None
        try:
            found = self.edge.service.open_hot(*known.name)
        except CacheError:
            return None  # it will be met again there, and told
        if found is None:
            return None
        if defaults is not self._defaults:
            # uvicorn makes a new list each second, for the date.
            self._defaults, self._beginning = defaults, b"HTTP/1.1 200 OK\r\n" + _lines(defaults)
        if found.manifest is not known.manifest:
            known.manifest, known.lines = found.manifest, _lines(found_headers(found.manifest)) + b"\r\n"
        return found, self._beginning + known.lines


class ExpressProtocol(BoundedProtocol):
    """HTTP/1.1 that knows heads which it has seen."""

    def __init__(
        self,
        express: Express,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._express = express
        self._in_message = False
        self._socket: socket.socket | None = None
        self._transfer: Transfer | None = None  # made with the first large blob, used for all
        self._found: tuple[OpenEntry, float] | None = None  # what is transferred, and since when
        self._held = bytearray()  # what arrived during the transfer
        self._closes_after = False
        # While the last answer was one of ours, uvicorn's own timer does not run.
        self._quiet_since: float | None = None
        self._quiet_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self._found is not None:
            self._hold(data)
            return
        is_head = (
            len(data) <= _MAX_HEAD_BYTES
            and data.startswith(_BEGINNING)
            and data.find(_END) == len(data) - len(_END)
            and self._is_between_messages()
        )
        if is_head and self._answer(data):
            return
        self._quiet_since = None
        self._express.pace.note_short(self.loop.time())
        super().data_received(data)
        if is_head and not self._in_message and self.cycle.keep_alive:
            # One message and no more, for there was one end of a head. The task that answers it begins after this call.
            cast("Any", self.scope)[REMEMBER] = functools.partial(self._express.remember, data)

    def on_message_begin(self) -> None:
        self._in_message = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def shutdown(self) -> None:
        if self._found is not None:
            self._closes_after = True
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transfer is not None:
            self._transfer.end()
        if self._quiet_timer is not None:
            self._quiet_timer.cancel()
        if self._socket is not None:
            self._socket.close()
        super().connection_lost(exc)

    def _is_between_messages(self) -> bool:
        """Whether all that arrived was answered, to the last byte as far as uvicorn knows."""
        cycle: RequestResponseCycle | None = self.cycle
        return (
            not self._in_message
            and self._refusal is None
            and (cycle is None or cycle.response_complete)
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
        )

    def _answer(self, head: bytes) -> bool:
        """Answers, or begins to; False where the ordinary way has to."""
        began_at = time.perf_counter()
        answer = self._express.find(head, self.server_state.default_headers)
        if answer is None:
            return False
        found, lines = answer
        blob = found.blob
        if blob.descriptor is not None and blob.size_bytes > PIECE_BYTES:
            return self._transfer_blob(found, lines, began_at)
        try:
            piece = read_at_hand(blob, 0, blob.size_bytes)
        except OSError:
            return False
        finally:
            blob.close()
        if piece is None or len(piece) != blob.size_bytes:
            return False
        self._begin()
        self.transport.writelines([lines, piece])
        self._has_answered(found, began_at)
        self._express.pace.note_short(self.loop.time())
        return True

    def _transfer_blob(self, found: OpenEntry, lines: bytes, began_at: float) -> bool:
        if self._transfer is None:
            try:
                self._transfer = self._create_transfer()
            except OSError:  # no descriptor is left
                found.close()
                return False
        self._begin()
        self._found = found, began_at
        self._transfer.begin(lines, found.blob)
        return True

    def _create_transfer(self) -> Transfer:
        # uvloop has no sendfile, and watches no descriptor of a transport's for others.
        self._socket = socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))
        return Transfer(
            self._socket,
            pace=self._express.pace,
            loop=self.loop,
            threads=self._express.edge.threads,
            idle_seconds=self._express.edge.idle_seconds,
            ended=self._has_transferred,
        )

    def _begin(self) -> None:
        """No timer of a connection that waits for a head may run on."""
        self._stop_timer()
        self._unset_keepalive_if_required()

    def _has_transferred(self, complete: bool) -> None:
        assert self._found is not None
        (found, began_at), self._found = self._found, None
        self._has_answered(found, began_at, complete=complete)
        if not complete:
            self.transport.abort()  # the answer has begun, so this is the only honest end
        elif self._closes_after:
            self.transport.close()
        else:
            self.flow.resume_reading()
            if self._held:
                held, self._held = bytes(self._held), bytearray()
                self.data_received(held)

    def _has_answered(self, found: OpenEntry, began_at: float, *, complete: bool = True) -> None:
        edge = self._express.edge
        edge.metrics.hit(found.manifest.size_bytes if complete else 0, time.perf_counter() - began_at)
        edge.health.succeeded()
        self._quiet_since = self.loop.time()
        if self._quiet_timer is None:
            self._quiet_timer = self.loop.call_later(self.timeout_keep_alive, self._close_if_quiet)

    def _close_if_quiet(self) -> None:
        self._quiet_timer = None
        if self._quiet_since is None or self._found is not None or self.transport.is_closing():
            return
        # One timer, moved on as it fires, costs less than one per answer.
        left_seconds = self._quiet_since + self.timeout_keep_alive - self.loop.time()
        if left_seconds > 0:
            self._quiet_timer = self.loop.call_later(left_seconds, self._close_if_quiet)
        else:
            self.transport.close()

    def _hold(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > _MAX_HELD_BYTES:
            self.flow.pause_reading()


def _lines(headers: Pairs) -> bytes:
    return b"".join(b"%b: %b\r\n" % pair for pair in headers)
