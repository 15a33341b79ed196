"""What this process has verified, so that a hit asks neither index nor manifest, and checks no blob twice."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Final

from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_server.blobs.bucket import OpenObject
from torchtpu_cache_server.blobs.layout import blob_name
from torchtpu_cache_server.index.base import EntryName

MAX_VERIFIED: Final = 16_384
MAX_OPEN: Final = 256
_MAX_ATTACHED: Final = 64


class SharedObject(OpenObject):
    """An open object that many read at once. It is closed when the last of them lets go of it; `close` does nothing."""

    def __init__(self, opened: OpenObject) -> None:
        self._opened = opened
        self.size_bytes = opened.size_bytes
        self.identity = opened.identity
        self.descriptor = opened.descriptor

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        return self._opened.read_at(offset, size_bytes)

    def is_unchanged(self) -> bool:
        return self._opened.is_unchanged()

    def close(self) -> None:
        pass

    def __del__(self) -> None:
        # Whoever drops an entry cannot know who still reads it; counting references is what Python does anyway.
        self._opened.close()


class Verified:
    """A verified entry: its blob is good for as long as the file is the one with this identity.

    Attributes:
        shared: the blob, kept open where it is among the last that were asked for.
        attached: what others keep with the entry, the last few.
    """

    __slots__ = ("attached", "blob", "identity", "manifest", "shared")

    def __init__(self, manifest: Manifest, identity: Hashable) -> None:
        self.manifest = manifest
        self.identity = identity
        self.blob = blob_name(manifest.digest)
        self.shared: SharedObject | None = None
        self.attached: deque[object] = deque(maxlen=_MAX_ATTACHED)


class Hot:
    """The entries that were verified by this process. Thread-safe.

    `epoch` moves with every removal: what was found before one may not be kept after it.
    """

    def __init__(self, max_verified: int = MAX_VERIFIED, max_open: int = MAX_OPEN) -> None:
        self._max_verified = max_verified
        self._max_open = max_open
        self._lock = threading.Lock()  # guards all below
        self._verified: OrderedDict[EntryName, Verified] = OrderedDict()
        self._open: OrderedDict[EntryName, None] = OrderedDict()  # those with a shared blob
        self.epoch = 0

    def get(self, name: EntryName) -> Verified | None:
        with self._lock:
            found = self._verified.get(name)
            if found is not None:
                self._verified.move_to_end(name)
                if found.shared is not None:
                    self._open.move_to_end(name)
            return found

    def put(self, name: EntryName, manifest: Manifest, identity: Hashable, epoch: int) -> None:
        """Remembers what was verified, unless anything was removed since `epoch`."""
        verified = Verified(manifest, identity)
        with self._lock:
            if epoch != self.epoch:
                return
            self._open.pop(name, None)
            self._verified[name] = verified
            self._verified.move_to_end(name)
            if len(self._verified) > self._max_verified:
                self._open.pop(self._verified.popitem(last=False)[0], None)

    def attach(self, name: EntryName, thing: object) -> bool:
        """Keeps a reference to `thing` for as long as the entry is known here; False where it is not known."""
        with self._lock:
            verified = self._verified.get(name)
            if verified is not None:
                verified.attached.append(thing)
            return verified is not None

    def share(self, name: EntryName, verified: Verified, blob: OpenObject) -> SharedObject:
        """Takes the open blob of an entry over, for all who ask for it from now on."""
        shared = SharedObject(blob)
        with self._lock:
            if self._verified.get(name) is verified:
                verified.shared = shared
                self._open[name] = None
                if len(self._open) > self._max_open:
                    self._verified[self._open.popitem(last=False)[0]].shared = None
        return shared

    def drop(self, name: EntryName) -> None:
        with self._lock:
            self.epoch += 1
            self._verified.pop(name, None)
            self._open.pop(name, None)

    def clear(self) -> None:
        with self._lock:
            self.epoch += 1
            self._verified.clear()
            self._open.clear()
