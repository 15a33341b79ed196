"""The tiers of a node, nearest first: what they have is checked against the request, what fails is counted.

No fault of a tier leaves this module: a backend's failure is a failure in the counters, and nothing to the caller.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache.gate import Credit, RemoteGate
from torchtpu_cache.later import Later
from torchtpu_cache.result import Result
from torchtpu_cache.sparing import SparingLog
from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import BreakerOpen, CorruptEntry, CorruptReason, LoadError, StoreError
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.request import Keyed
from torchtpu_cache_core.store import Store, Stored

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Tiered:
    tier: Tier
    store: Store


Use = Callable[[Tier, Stored], Result]
"""Unpacks and loads an entry.

Raises:
    CorruptEntry: its payload is not what it says.
    LoadError: it does not become live.
"""


class Tiers:
    """Memory, disk and remote, as far as they are there. Thread-safe.

    Args:
        memory, disk, remote: the stores, or None.
        counters: what is counted into.
        later: writes to the disk what came from afar; None writes it before it is returned.
    """

    def __init__(
        self,
        memory: Store | None,
        disk: Store | None,
        remote: Store | None,
        counters: Counters,
        clock: Clock,
        later: Later | None = None,
    ) -> None:
        tiers = ((Tier.MEMORY, memory), (Tier.DISK, disk), (Tier.REMOTE, remote))
        self._tiers = [_Tiered(tier, store) for tier, store in tiers if store is not None]
        self._counters = counters
        self._clock = clock
        self._later = later
        self._gate = RemoteGate(clock)
        self._credits = {Tier.DISK: Credit(), Tier.REMOTE: Credit()}
        self._sparing = SparingLog(_log, clock)

    def find(self, keyed: Keyed, use: Use) -> Result | None:
        """What `use` makes of the nearest entry that it can use; None where no tier has one.

        That entry is kept in the nearer tiers. One that cannot be used is counted, set aside where the bytes are to
        blame, and replaced by what a farther tier has.
        """
        nearer: list[_Tiered] = []
        for tiered in self._asked(keyed):
            stored = self._get(tiered, keyed)
            result = None if stored is None else self._used(tiered, stored, use)
            if stored is not None and result is not None:
                for each in nearer:
                    self._bring_nearer(each, stored)
                return result
            nearer.append(tiered)
        return None

    def _asked(self, keyed: Keyed) -> Iterator[_Tiered]:
        for tiered in self._tiers:
            credit = self._credits.get(tiered.tier)
            if credit is not None and credit.used_up:
                self._counters.skipped(tiered.tier, "slow")
            elif tiered.tier is Tier.REMOTE and self._gate.closed(keyed.program_bytes):
                self._counters.skipped(tiered.tier, "cheap_compiles")
            else:
                yield tiered

    def _get(self, tiered: _Tiered, keyed: Keyed) -> Stored | None:
        """What the tier has, checked against the request; a failure is counted, and reads as nothing."""
        asked = self._clock.monotonic()
        stored = self._checked(tiered, keyed, asked)
        credit = self._credits.get(tiered.tier)
        if credit is not None:
            seconds = self._clock.monotonic() - asked
            if stored is None:
                credit.waited(seconds)
            else:
                credit.hit(seconds, stored.entry.header.compile_seconds)
        return stored

    def _checked(self, tiered: _Tiered, keyed: Keyed, asked: float) -> Stored | None:
        try:
            stored = tiered.store.get(keyed.key)
            if stored is None:
                self._counters.miss(tiered.tier)
                if tiered.tier is Tier.REMOTE:
                    self._gate.round_trip(self._clock.monotonic() - asked)
                return None
            stored.entry.check(keyed.key, keyed.components)
            return stored
        except CorruptEntry as error:
            self._set_aside(tiered, keyed.key, error)
        except BreakerOpen:
            self._counters.skipped(tiered.tier, "breaker_open")
        except StoreError as error:
            self._sparing.warning(f"{tiered.tier}.{error.kind}", "the %s tier failed: %s", tiered.tier, error)
            self._counters.failure(tiered.tier, error.kind)
        except Exception:
            _log.exception("the %s tier failed", tiered.tier)
            self._counters.failure(tiered.tier, "internal")
        return None

    def _used(self, tiered: _Tiered, stored: Stored, use: Use) -> Result | None:
        try:
            return use(tiered.tier, stored)
        except CorruptEntry as error:
            self._set_aside(tiered, stored.entry.key, error)
        except LoadError as error:
            self._sparing.warning(f"{tiered.tier}.load", "an entry of the %s tier did not load: %s", tiered.tier, error)
            self._counters.failure(tiered.tier, "load")
            if error.blames_entry:
                self._free(tiered, stored.entry.key, CorruptReason.PAYLOAD)
        except MemoryError:
            self._counters.failure(tiered.tier, "memory")
        return None

    def _set_aside(self, tiered: _Tiered, key: Key, error: CorruptEntry) -> None:
        message = "the %s tier held a bad entry for %s: %s"
        self._sparing.warning(f"{tiered.tier}.{error.kind}", message, tiered.tier, key.short, error)
        self._counters.failure(tiered.tier, error.kind)
        self._free(tiered, key, error.reason)

    def _free(self, tiered: _Tiered, key: Key, reason: CorruptReason) -> None:
        """Frees a key of a local tier. A bad entry of the remote is the service's to remove."""
        if tiered.tier is Tier.REMOTE:
            return
        try:
            tiered.store.set_aside(key, reason)
        except StoreError as error:
            self._counters.failure(tiered.tier, error.kind)

    def compiled(self, compile_seconds: float, program_bytes: int) -> None:
        """A program of this size took this long: what that says of asking a tier for the next."""
        self._gate.compiled(compile_seconds, program_bytes)
        for credit in self._credits.values():
            credit.compiled(compile_seconds)

    @contextlib.contextmanager
    def waiting_for_disk(self) -> Iterator[bool]:
        """A write that its caller waits for; gives whether the disk is quick enough for that."""
        credit = self._credits[Tier.DISK]
        started = self._clock.monotonic()
        try:
            yield not credit.used_up
        finally:
            credit.waited(self._clock.monotonic() - started)

    def store_here(self, entry: Entry, attestation: Attestation | None, *, to_disk: bool = True) -> None:
        """Keeps what was compiled in memory and on disk."""
        for tiered in self._tiers:
            if tiered.tier is Tier.MEMORY or (tiered.tier is Tier.DISK and to_disk):
                self._keep(tiered, entry, attestation)
            elif tiered.tier is Tier.DISK:
                self._counters.skipped(Tier.DISK, "busy")

    def _bring_nearer(self, tiered: _Tiered, stored: Stored) -> None:
        """Keeps what a farther tier had. Its caller need not wait for the disk: the farther tier still has it."""
        keep = partial(self._keep, tiered, stored.entry, stored.attestation)
        if tiered.tier is not Tier.DISK or self._later is None:
            keep()
        elif not self._later.do(keep, stored.entry.size_bytes):
            self._counters.skipped(Tier.DISK, "busy")

    def _keep(self, tiered: _Tiered, entry: Entry, attestation: Attestation | None) -> None:
        """Stores an entry in a local tier; a failure is counted and costs nothing else."""
        try:
            tiered.store.put(entry, attestation)
        except StoreError as error:
            topic = f"{tiered.tier}.put.{error.kind}"
            self._sparing.warning(topic, "the %s tier did not take an entry: %s", tiered.tier, error)
            self._counters.failure(tiered.tier, error.kind)
        except Exception:
            _log.exception("the %s tier did not take an entry", tiered.tier)
            self._counters.failure(tiered.tier, "internal")

    def close(self) -> None:
        """Closes the stores."""
        for tiered in self._tiers:
            tiered.store.close()
