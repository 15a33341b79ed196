"""An entry on its way in: announced, checked and hashed as it arrives, and published at the end or gone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from torchtpu_cache_core.closing import Closing
from torchtpu_cache_core.entry import Verifier
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, StoreUnavailable
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import Digest, Key
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_server.admission import Reservation
from torchtpu_cache_server.blobs.bucket import Staged

Publish = Callable[[Header], tuple[PutStatus, Manifest]]


class Incoming(Closing):
    """An entry that is arriving; invisible until `commit`.

    Calls from several threads run one after another: a request that is cancelled while a thread still feeds may close
    at once, and no write meets a descriptor that was given back. Closing gives back the reservation and the temporary
    file in every case.

    Args:
        key, digest, size_bytes: of the entry, as the client announced them.
        max_entry_bytes: what an entry may declare at most.
        reservation: is told of what arrives before it is written.
        staged: takes the bytes.
        publish: makes what was staged the entry of its key; CorruptEntry and StoreError as in `commit`.
        held: what is given back at the end, `reservation` and `staged`.
    """

    def __init__(
        self,
        key: Key,
        digest: Digest,
        size_bytes: int,
        *,
        max_entry_bytes: int,
        reservation: Reservation,
        staged: Staged,
        publish: Publish,
        held: contextlib.ExitStack,
    ) -> None:
        self._key = key
        self._digest = digest
        self._size_bytes = size_bytes
        self._reservation = reservation
        self._staged = staged
        self._publish = publish
        self._held = held
        self._lock = threading.Lock()  # guards the temporary file and all below
        self._received_bytes = 0
        self._closed = False
        self._verifier = Verifier(max_entry_bytes)

    def feed(self, data: bytes | memoryview) -> None:
        """Takes the next piece.

        Raises:
            CorruptEntry: it cannot become the entry that was announced.
            StoreFull: no room could be made for it.
            StoreError: it could not be written.
        """
        with self._lock:
            self._check_open()
            self._received_bytes += len(data)
            if self._received_bytes > self._size_bytes:
                raise CorruptEntry(CorruptReason.LENGTH, "longer than announced")
            before = self._verifier.header
            self._verifier.feed(data)
            if before is None and (header := self._verifier.header) is not None:
                self._check_header(header)
            self._reservation.arrived(len(data))
            self._staged.write(data)

    def commit(self) -> tuple[PutStatus, Manifest]:
        """Publishes what was received; a key that has an entry keeps it.

        Raises:
            CorruptEntry: it is cut short, or its digest is not the announced one.
            StoreError: it could not be published.
        """
        with self._lock:
            self._check_open()
            header, digest = self._verifier.finish()
            if digest != self._digest:
                raise CorruptEntry(CorruptReason.DIGEST, "the bytes do not have the announced digest")
            self._reservation.complete()
            return self._publish(header)

    def close(self) -> None:
        """Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._held.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable("the upload was given up")

    def _check_header(self, header: Header) -> None:
        if header.key != self._key:
            raise CorruptEntry(CorruptReason.KEY, "the entry is of another key than the one it was sent to")
        declared = self._verifier.frame.entry_bytes
        if declared > self._size_bytes:
            raise CorruptEntry(CorruptReason.SHORT, "the entry declares more bytes than were announced")
        if declared < self._size_bytes:
            raise CorruptEntry(CorruptReason.LENGTH, "the entry declares fewer bytes than were announced")
