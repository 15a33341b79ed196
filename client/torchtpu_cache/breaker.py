"""A circuit breaker over a store: a dead remote costs a job one bounded wait, not one per program.

    closed ── no connection, no answer in time, told to wait, or N other failures in a row ──▶ open
    open   ── a probe in the background was answered ──▶ closed

While open, every call fails at once with `BreakerOpen`, and is counted as skipped: neither a miss nor a failure of the
store. A refusal (permissions, read-only, full) does not open the breaker, for the store answers; it is remembered for
a while for calls that need the same right, so that a read-only client does not offer every entry in vain.
"""

from __future__ import annotations

import enum
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    BreakerOpen,
    CorruptEntry,
    EntryTooLarge,
    FailureKind,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.perprocess import PerProcess
from torchtpu_cache_core.store import EntryInfo, PutOutcome, Store, Stored, StoreStats
from torchtpu_cache_core.stores.wrap import Wrapper

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_PROBE_KEY: Final = Key("probe-" + "0" * 64)
"""Of a scheme that no entry has: asking for it costs the store a look-up and no more."""

_OPENS_AT_ONCE: Final = frozenset({FailureKind.CONNECT, FailureKind.TIMEOUT})
_REFUSALS: Final = frozenset({FailureKind.UNAUTHORIZED, FailureKind.FORBIDDEN, FailureKind.READ_ONLY})


class _Right(enum.Enum):
    """What a refusal speaks for: a full store takes no entry, but deletes and reads."""

    READ = "read"
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """When to give up on a store, and how often to try it again.

    Args:
        failures: so many failures in a row open the breaker, where one alone does not.
        first_probe_seconds, longest_probe_seconds: the pause before a probe doubles from the one to the other, less
            a random part of up to half. It starts anew only once a real call has succeeded.
        refusal_seconds: how long a refusal speaks for later calls.
        full_seconds: how long a full store is offered nothing.
    """

    failures: int = 3
    first_probe_seconds: float = 0.5
    longest_probe_seconds: float = 30.0
    refusal_seconds: float = 300.0
    full_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStatus:
    """How a breaker stands in this process, at one moment.

    Args:
        open: whether calls are being skipped.
        kind, reason: of the last failure or refusal; None and empty where there was none since the last success.
        opened_total: how often it opened.
        skipped_total: calls that were not made because it was open.
        refused_total: calls that were not made because of a remembered refusal.
    """

    open: bool
    kind: FailureKind | None
    reason: str
    opened_total: int
    skipped_total: int
    refused_total: int


class _Circuit:
    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards all below; held for no I/O and no wait
        self.open_error: StoreError | None = None
        self.last_error: StoreError | None = None
        self.failures = 0
        self.probes = 0
        self.not_before = 0.0
        self.refusals: dict[_Right, tuple[StoreError, float]] = {}
        self.opened_total = 0
        self.skipped_total = 0
        self.refused_total = 0
        self.stop = threading.Event()


class BreakerStore(Wrapper):
    """`inner` behind a circuit breaker. Thread-safe; a forked child starts closed, with a state of its own.

    Args:
        probe: asks the store something cheap, and raises StoreError where it is still dead; `contains` of a key that
            nobody has by default. Called by one daemon thread, which runs only while the breaker is open.
        jitter: gives a number in [0, 1).
    """

    def __init__(
        self,
        inner: Store,
        *,
        probe: Callable[[], object] | None = None,
        settings: BreakerSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(inner)
        self._probe = probe or (lambda: inner.contains(_PROBE_KEY))
        self._settings = settings or BreakerSettings()
        self._clock = clock
        self._jitter = jitter
        self._circuit = PerProcess(_Circuit)

    @property
    def status(self) -> BreakerStatus:
        circuit = self._circuit.get()
        with circuit.lock:
            error = circuit.open_error or circuit.last_error
            return BreakerStatus(
                open=circuit.open_error is not None,
                kind=None if error is None else error.kind,
                reason="" if error is None else str(error),
                opened_total=circuit.opened_total,
                skipped_total=circuit.skipped_total,
                refused_total=circuit.refused_total,
            )

    def get(self, key: Key) -> Stored | None:
        return self._guarded(_Right.READ, lambda: self._inner.get(key))

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        return self._guarded(_Right.PUT, lambda: self._inner.put(entry, attestation))

    def contains(self, key: Key) -> bool:
        return self._guarded(_Right.READ, lambda: self._inner.contains(key))

    def delete(self, key: Key) -> bool:
        return self._guarded(_Right.DELETE, lambda: self._inner.delete(key))

    def iterate(self) -> Iterator[EntryInfo]:
        entries = iter(self._inner.iterate())
        while (info := self._guarded(_Right.READ, lambda: next(entries, None))) is not None:
            yield info

    def stats(self) -> StoreStats:
        return self._guarded(_Right.READ, self._inner.stats)

    def close(self) -> None:
        self._circuit.get().stop.set()
        super().close()

    def probe_once(self) -> bool:
        """Asks the store whether it is back, and closes the breaker if it is. What the background thread runs."""
        circuit = self._circuit.get()
        try:
            self._probe()
        except StoreError as error:
            if error.kind not in _REFUSALS:  # a refusal is an answer; the next real call hears it itself
                with circuit.lock:
                    circuit.last_error = error
                    self._hold_off(circuit, error)
                return False
        with circuit.lock:
            circuit.open_error = None
            circuit.failures = 0
        return True

    def _guarded(self, right: _Right, call: Callable[[], _T]) -> _T:
        circuit = self._circuit.get()
        if circuit.open_error is not None or circuit.refusals:
            self._refuse_now(circuit, right)
        try:
            value = call()
        except StoreError as error:
            self._failed(circuit, right, error)
            raise
        if circuit.failures or circuit.probes or circuit.last_error is not None:
            self._answered(circuit)
        return value

    def _refuse_now(self, circuit: _Circuit, right: _Right) -> None:
        with circuit.lock:
            if circuit.open_error is not None:
                circuit.skipped_total += 1
                raise BreakerOpen(f"not asked, since {circuit.open_error}", circuit.open_error.kind)
            refusal, until = circuit.refusals.get(right, (None, 0.0))
            if refusal is None:
                return
            if self._clock.monotonic() < until:
                circuit.refused_total += 1
                raise _again(refusal)
            del circuit.refusals[right]

    def _answered(self, circuit: _Circuit) -> None:
        with circuit.lock:
            circuit.failures = circuit.probes = 0
            if not circuit.refusals:
                circuit.last_error = None

    def _failed(self, circuit: _Circuit, right: _Right, error: StoreError) -> None:
        settings = self._settings
        if isinstance(error, EntryTooLarge | CorruptEntry):
            return  # about one entry: it says nothing of the store
        with circuit.lock:
            circuit.last_error = error
            if isinstance(error, StoreFull) or error.kind in _REFUSALS:
                seconds = settings.full_seconds if isinstance(error, StoreFull) else settings.refusal_seconds
                circuit.refusals[right] = (error, self._clock.monotonic() + seconds)
                circuit.failures = circuit.probes = 0
                return
            circuit.failures += 1
            told_to_wait = _asked_for_seconds(error) is not None
            if not (error.kind in _OPENS_AT_ONCE or told_to_wait or circuit.failures >= settings.failures):
                return
            if circuit.open_error is not None:
                return  # another caller's failure opened it while this one waited
            circuit.open_error = error
            circuit.opened_total += 1
            self._hold_off(circuit, error)
        thread = threading.Thread(target=self._probe_until_closed, args=(circuit,), name="breaker-probe", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: without a probe it could never close again
            with circuit.lock:
                circuit.open_error = None

    def _hold_off(self, circuit: _Circuit, error: StoreError | None) -> None:
        """Sets when to probe next; the circuit's lock is held."""
        settings = self._settings
        longest = min(settings.longest_probe_seconds, settings.first_probe_seconds * 2.0 ** min(circuit.probes, 30))
        asked_for = _asked_for_seconds(error) or 0.0
        circuit.probes += 1
        circuit.not_before = self._clock.monotonic() + max(asked_for, longest * (1 - self._jitter() / 2))

    def _probe_until_closed(self, circuit: _Circuit) -> None:
        while not circuit.stop.wait(max(0.0, circuit.not_before - self._clock.monotonic())):
            try:
                if self.probe_once():
                    return
            except Exception:
                _log.exception("a probe of the %s store failed in a way that no store should", self.capabilities.name)
                with circuit.lock:
                    self._hold_off(circuit, None)


def _asked_for_seconds(error: StoreError | None) -> float | None:
    return error.retry_after_seconds if isinstance(error, StoreUnavailable) else None


def _again(refusal: StoreError) -> StoreError:
    """A new exception that says the same, since raising one twice would chain the tracebacks of two threads."""
    message = f"not asked again, since {refusal}"
    return StoreFull(message) if isinstance(refusal, StoreFull) else StoreRefused(message, refusal.kind)
