"""One concern, one decorator over a store. Each passes on what it does not change, capabilities included."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, Protocol, TypeVar

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    FailureKind,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, Store, Stored, StoreStats
from torchtpu_cache_core.stores.immutable import immutable

T = TypeVar("T")
Operation = Literal["get", "put", "contains", "delete", "iterate", "stats"]


class Wrapper(Store):
    """Passes everything on to `inner`, and closes it; the base of the others."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def get(self, key: Key) -> Stored | None:
        return self._inner.get(key)

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        return self._inner.put(entry, attestation)

    def contains(self, key: Key) -> bool:
        return self._inner.contains(key)

    def delete(self, key: Key) -> bool:
        return self._inner.delete(key)

    def set_aside(self, key: Key, reason: CorruptReason) -> bool:
        return self._inner.set_aside(key, reason)

    def iterate(self) -> Iterator[EntryInfo]:
        return self._inner.iterate()

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


class ReadOnlyStore(Wrapper):
    """Refuses what would change it with `StoreRefused` of kind READ_ONLY, and says so in its capabilities."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._inner.capabilities, writable=False, deletes=False)

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        raise self._refusal()

    def delete(self, key: Key) -> bool:
        raise self._refusal()

    def set_aside(self, key: Key, reason: CorruptReason) -> bool:
        raise self._refusal()

    def _refusal(self) -> StoreRefused:
        return StoreRefused(f"the {self.capabilities.name} store is only read here", FailureKind.READ_ONLY)


class CheckedStore(Wrapper):
    """Unpacks what `get` found before it gives it, so that a payload that lies is found here too.

    The inner store sets the entry aside, so that its key is free again.
    """

    def get(self, key: Key) -> Stored | None:
        stored = self._inner.get(key)
        if stored is None:
            return None
        try:
            stored.entry.check(key)
            stored.entry.executable()
        except CorruptEntry as error:
            with contextlib.suppress(StoreError):  # the corrupt entry is what the caller has to hear of
                self._inner.set_aside(key, error.reason)
            raise
        return stored

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """As the contract says; CorruptEntry for an entry that could not be unpacked again."""
        entry = immutable(entry)
        entry.executable()
        return self._inner.put(entry, attestation)


class RetryStore(Wrapper):
    """Asks again where a retry may help (`StoreUnavailable`), with growing, jittered pauses.

    A store that asks for a longer pause than the next one planned gets it, up to `most_seconds`. Listings are not
    retried: what was given already cannot be taken back.

    Args:
        attempts: how often to ask at most, the first time included.
        first_seconds: the first pause, doubled each time.
        most_seconds: no pause is longer.
        sleep: waits; handed in so that a test need not.
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 3,
        first_seconds: float = 0.05,
        most_seconds: float = 2.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._attempts = attempts
        self._first_seconds = first_seconds
        self._most_seconds = most_seconds
        self._sleep = sleep

    def get(self, key: Key) -> Stored | None:
        return self._retried(lambda: self._inner.get(key))

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        return self._retried(lambda: self._inner.put(entry, attestation))

    def contains(self, key: Key) -> bool:
        return self._retried(lambda: self._inner.contains(key))

    def delete(self, key: Key) -> bool:
        return self._retried(lambda: self._inner.delete(key))

    def stats(self) -> StoreStats:
        return self._retried(self._inner.stats)

    def _retried(self, call: Callable[[], T]) -> T:
        pause = self._first_seconds
        for _ in range(self._attempts - 1):
            try:
                return call()
            except StoreUnavailable as error:
                asked = error.retry_after_seconds or 0.0
                jittered = pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing
                self._sleep(min(self._most_seconds, max(asked, jittered)))
                pause *= 2
        return call()


class Meter(Protocol):
    """Takes what a `MeteredStore` saw. Called from any thread; must not raise."""

    def observed(self, store: str, operation: Operation, outcome: str, seconds: float) -> None:
        """One operation ended.

        Args:
            store: the store's name, from its capabilities.
            outcome: `hit` or `miss` of a get; a PutStatus; a FailureKind where it failed; else `ok`. Bounded, and
                fit for a metric's label.
            seconds: how long it took.
        """
        ...


class MeteredStore(Wrapper):
    """Tells a meter of each operation; a failure is never reported as a miss. A listing is timed to its end."""

    def __init__(self, inner: Store, meter: Meter, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self._meter = meter
        self._clock = clock

    def get(self, key: Key) -> Stored | None:
        return self._metered("get", lambda: self._inner.get(key), lambda stored: "miss" if stored is None else "hit")

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        return self._metered("put", lambda: self._inner.put(entry, attestation), lambda outcome: outcome.status)

    def contains(self, key: Key) -> bool:
        return self._metered("contains", lambda: self._inner.contains(key))

    def delete(self, key: Key) -> bool:
        return self._metered("delete", lambda: self._inner.delete(key))

    def iterate(self) -> Iterator[EntryInfo]:
        yield from self._metered("iterate", lambda: list(self._inner.iterate()))

    def stats(self) -> StoreStats:
        return self._metered("stats", self._inner.stats)

    def _metered(self, operation: Operation, call: Callable[[], T], outcome: Callable[[T], str] = lambda _: "ok") -> T:
        began = self._clock.monotonic()
        result = "error"
        try:
            value = call()
            result = outcome(value)
            return value
        except StoreError as error:
            result = error.kind
            raise
        finally:
            self._meter.observed(self.capabilities.name, operation, str(result), self._clock.monotonic() - began)
