"""A compiled executable on its way into the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import InvalidRequest, StoreError
from torchtpu_cache_core.request import COMPRESSED_FORMATS
from torchtpu_cache_core.store import CHEAP_COMPILE_SECONDS

if TYPE_CHECKING:
    from torchtpu_cache.compilers.base import Compiled
    from torchtpu_cache_core.names import Digest
    from torchtpu_cache_core.request import Keyed


class Publication:
    """What was compiled for `keyed`, and the entry that it becomes: packed by whoever asks first. A `result.Packed`.

    Thread-safe without a lock, which a fork could leave locked for ever: two threads that ask at once both pack, and
    get the same bytes.

    Args:
        created_seconds: of the entry, since the Unix epoch.
    """

    def __init__(self, keyed: Keyed, compiled: Compiled, created_seconds: float) -> None:
        self.keyed = keyed
        self.compiled = compiled
        self._created_seconds = created_seconds
        self._entry: Entry | None = None

    @property
    def cheap(self) -> bool:
        """Whether it was compiled faster than it is worth an upload, or anybody's wait."""
        return self.compiled.compile_seconds < CHEAP_COMPILE_SECONDS

    def entry(self) -> Entry:
        """The entry.

        Raises:
            EntryTooLarge, InvalidRequest: as `Entry.build`.
            MemoryError: there is no room for it.
        """
        if self._entry is None:
            keyed, compiled = self.keyed, self.compiled
            self._entry = Entry.build(
                compiled.executable,
                key=keyed.key,
                components=keyed.components,
                executable_format=keyed.executable_format,
                compress=keyed.executable_format not in COMPRESSED_FORMATS,
                producer=compiled.producer,
                road=compiled.road,
                compile_seconds=compiled.compile_seconds,
                created_seconds=self._created_seconds,
            )
        return self._entry

    @property
    def digest(self) -> Digest | None:
        entry = self._entry_if_any()
        return None if entry is None else entry.digest

    @property
    def size_bytes(self) -> int:
        entry = self._entry_if_any()
        return 0 if entry is None else entry.size_bytes

    def _entry_if_any(self) -> Entry | None:
        try:
            return self.entry()
        except (StoreError, InvalidRequest, MemoryError):
            return None
