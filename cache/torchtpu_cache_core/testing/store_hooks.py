"""What the contract suite asks of a store's test class, and what it asks stores about."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

import pytest

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import FailureKind
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.testing.clock import ManualClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a store is opened with; the default lets nothing be evicted."""

    bytes: int = 1 << 30
    entries: int = 10_000


class StoreHooks:
    """What a test class tells of its store, and the fixtures made of that."""

    model_examples: ClassVar[int] = 25
    """How many random histories the model test tries; fewer where each opens something slow."""

    sets_aside: ClassVar[bool] = True
    """What a get finds corrupt is moved away by the store, so that its key is free at once."""

    # ---- hooks -----------------------------------------------------------------------------------------------

    def open_store(self, place: Path, clock: ManualClock, limits: Limits) -> Store:
        """A store whose medium belongs to `place`. Two stores of one place share it, if the store is shared."""
        raise NotImplementedError

    def raw_read(self, place: Path, key: Key) -> bytes | None:
        """The stored bytes of `key`, read past the store; the entry's own bytes stand first. None if absent."""
        pytest.skip("capability: the store has no medium that can be reached past it")

    def raw_write(self, place: Path, key: Key, data: bytes) -> None:
        """Puts any bytes where the store would look for the entry of `key`."""
        pytest.skip("capability: the store has no medium that can be reached past it")

    def raw_names(self, place: Path) -> list[str]:
        """The name of everything in the medium that stands where entries stand, temporary files included."""
        pytest.skip("capability: the store has no medium that can be reached past it")

    def opener(self, place: Path) -> tuple[str, list[str]]:
        """`module:function` and its string arguments, which open the store of `place` in another process."""
        pytest.skip("capability: the suite was not told how to open the store in another process")

    def broken(self, kind: FailureKind) -> contextlib.AbstractContextManager[None]:
        """While entered, the medium of all stores opened so far fails: FULL, IO or FORBIDDEN."""
        pytest.skip("capability: the suite was not told how to make the medium fail")

    # ---- fixtures --------------------------------------------------------------------------------------------

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path / "store"

    @pytest.fixture
    def store(self, place: Path, clock: ManualClock) -> Iterator[Store]:
        with self.open_store(place, clock, Limits()) as store:
            yield store


def entry_in(store: Store, key: Key) -> Entry:
    """The entry under a key, which must be there and be its own."""
    stored = store.get(key)
    assert stored is not None
    stored.entry.check(key)
    return stored.entry


def lacks(capability: str) -> NoReturn:
    """Skips the test."""
    pytest.skip(f"capability: the store does not declare {capability}")


def deletes(store: Store) -> bool:
    """Whether this store can delete here and now."""
    return store.capabilities.deletes and store.capabilities.writable
