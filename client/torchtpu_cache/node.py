"""The node: one object that gets an executable from the nearest tier, or has it compiled, once.

    memory ─▶ disk ─▶ remote ─▶ compile ─▶ memory, disk ─▶ spool ─▶ remote

Whatever the cache's state, a compile returns its executable whenever XLA can make it: every fault of a tier is
counted, logged, and passed by. The agent is this object behind a socket; a job may embed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchtpu_cache.breaker import BreakerOpen
from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache.gate import RemoteGate
from torchtpu_cache.later import LaterWriter
from torchtpu_cache.sparing import SparingLog
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.config import Mode
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import (
    Bypass,
    CompileError,
    CorruptEntry,
    CorruptReason,
    InvalidRequest,
    LoadError,
    StoreError,
)
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key, Namespace
from torchtpu_cache_core.request import ProgramResolver, Request, ResolvedRequest, resolve
from torchtpu_cache_core.singleflight import SingleFlight
from torchtpu_cache_core.store import CHEAP_COMPILE_SECONDS, Store, Stored
from torchtpu_cache_core.stores.wrap import SetsAside

if TYPE_CHECKING:
    from torchtpu_cache.compilers.base import Compiled, Compiler, Loaded
    from torchtpu_cache.spool import Spool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """An executable and where it came from.

    Args:
        key: None where the request bypassed the cache.
        tier: MEMORY, DISK, REMOTE or COMPILED.
        executable: the serialised executable, in the request's format.
        digest: of the entry that holds it; None where there is none.
        entry_bytes: size of that entry, as stored and sent.
        seconds: from asking to having it (loaded, where the caller loads).
        compile_seconds: what the compile cost, now or when the entry was made.
        bypassed: why the cache had no part in it, or None.
        loaded: what the caller's `load` gave.
    """

    key: Key | None
    tier: Tier
    executable: bytes | memoryview
    digest: Digest | None
    entry_bytes: int
    seconds: float
    compile_seconds: float
    bypassed: str | None = None
    loaded: Loaded | None = None

    @property
    def seconds_saved(self) -> float:
        """Against compiling here; negative where the cache was slower, zero for a compile."""
        return 0.0 if self.tier is Tier.COMPILED else self.compile_seconds - self.seconds


@dataclass(frozen=True, slots=True)
class _Tiered:
    tier: Tier
    store: Store


LoadExecutable = Callable[[bytes | memoryview], "Loaded"]


class Node:
    """Gets or compiles executables through up to three tiers. Thread-safe; one compile per key and process.

    Args:
        resolver: finds what a program is to the key.
        memory, disk, remote: the tiers, nearest first; a tier that is not there is None.
        spool: where compiled entries wait for the remote; None publishes nothing.
        machine_key: marks what this machine compiled in its disk tier; None leaves the mark out.
        counters: what the node counts into.
    """

    def __init__(
        self,
        *,
        resolver: ProgramResolver,
        memory: Store | None = None,
        disk: Store | None = None,
        remote: Store | None = None,
        spool: Spool | None = None,
        machine_key: bytes | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        mode: Mode = Mode.ON,
        counters: Counters | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        tiers = ((Tier.MEMORY, memory), (Tier.DISK, disk), (Tier.REMOTE, remote))
        self._tiers = [_Tiered(tier, store) for tier, store in tiers if store is not None]
        self._resolver = resolver
        self._spool = spool
        self._machine_key = machine_key
        self._namespace = namespace
        self.mode = mode
        self.counters = Counters() if counters is None else counters
        self._clock = clock
        self._later = None if disk is None else LaterWriter(disk, self.counters)
        self._gate = RemoteGate(clock)
        self._sparing = SparingLog(_log, clock)
        self._flights: SingleFlight[Key, Result] = SingleFlight()

    def get_or_compile(
        self,
        request: Request,
        compiler: Compiler,
        *,
        load: LoadExecutable | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Result:
        """The executable of `request`, from the nearest tier that has it, else from `compiler`.

        Args:
            load: makes the executable live; a hit counts only once this has returned.
            progress: called about once a second with the seconds since a compile began.

        Raises:
            CompileError: XLA cannot make it. No fault of the cache is ever raised.
            LoadError: what XLA has just made does not load.
        """
        started = self._clock.monotonic()
        self.counters.request()
        if self.mode is Mode.OFF:
            return self._bypass("off", request, compiler, load, progress, started)
        try:
            resolved = resolve(request, self._resolver)
        except Bypass as bypass:
            return self._bypass(bypass.reason, request, compiler, load, progress, started)
        except InvalidRequest:
            return self._bypass("invalid_options", request, compiler, load, progress, started)
        except Exception:
            _log.exception("a key could not be made; compiling without the cache")
            return self._bypass("internal", request, compiler, load, progress, started)

        return self._answer(resolved, compiler, load, progress, started)

    def answer(
        self,
        resolved: ResolvedRequest,
        compiler: Compiler,
        *,
        load: LoadExecutable | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> Result:
        """`get_or_compile` for a caller that has the key already. In mode OFF it compiles like any other bypass."""
        started = self._clock.monotonic()
        self.counters.request()
        if self.mode is Mode.OFF:
            return self._bypass("off", resolved.request, compiler, load, progress, started)
        return self._answer(resolved, compiler, load, progress, started)

    def _answer(
        self,
        resolved: ResolvedRequest,
        compiler: Compiler,
        load: LoadExecutable | None,
        progress: Callable[[float], None] | None,
        started: float,
    ) -> Result:
        def flight() -> Result:
            hit = self._look_up(resolved, load, started) if self.mode.serves else None
            return hit or self._compile(resolved, compiler, load, progress, started)

        result, leader = self._flights.do(resolved.key, flight)
        return result if leader else self._join(result, resolved, compiler, load, progress, started)

    def _join(
        self,
        theirs: Result,
        resolved: ResolvedRequest,
        compiler: Compiler,
        load: LoadExecutable | None,
        progress: Callable[[float], None] | None,
        started: float,
    ) -> Result:
        """Uses what another thread's flight brought, as a hit in this process's memory."""
        try:
            loaded = None if load is None else load(theirs.executable)
        except LoadError as error:
            self._sparing.warning("memory.load", "an executable that another thread got did not load: %s", error)
            self.counters.failure(Tier.MEMORY, "load")
            return self._compile(resolved, compiler, load, progress, started)
        seconds = self._clock.monotonic() - started
        result = replace(theirs, tier=Tier.MEMORY, seconds=seconds, loaded=loaded)
        self.counters.hit(Tier.MEMORY, result.seconds_saved)
        return result

    # -- looking up

    def _look_up(self, resolved: ResolvedRequest, load: LoadExecutable | None, started: float) -> Result | None:
        farther: list[_Tiered] = []
        for tiered in self._tiers:
            if tiered.tier is Tier.REMOTE and self._gate.closed(len(resolved.request.program)):
                self.counters.skipped(Tier.REMOTE, "cheap_compiles")
                continue
            stored = self._get(tiered, resolved)
            if stored is None:
                farther.append(tiered)
                continue
            result = self._use(tiered, stored.entry, resolved, load, started)
            if result is None:
                continue
            for nearer in farther:
                self._keep(nearer, stored.entry, stored.attestation)
            return result
        return None

    def _get(self, tiered: _Tiered, resolved: ResolvedRequest) -> Stored | None:
        """What the tier has, checked against the request; a failure is counted, and reads as nothing."""
        asked = self._clock.monotonic()
        try:
            stored = tiered.store.get(resolved.key)
            if stored is None:
                self.counters.miss(tiered.tier)
                if tiered.tier is Tier.REMOTE:
                    self._gate.round_trip(self._clock.monotonic() - asked)
                return None
            stored.entry.check(resolved.key, resolved.components)
            return stored
        except CorruptEntry as error:
            self._set_aside(tiered, resolved.key, error)
        except BreakerOpen:
            self.counters.skipped(tiered.tier, "breaker_open")
        except StoreError as error:
            self._sparing.warning(f"{tiered.tier}.{error.kind}", "the %s tier failed: %s", tiered.tier, error)
            self.counters.failure(tiered.tier, error.kind)
        except Exception:
            _log.exception("the %s tier failed", tiered.tier)
            self.counters.failure(tiered.tier, "internal")
        return None

    def _use(
        self,
        tiered: _Tiered,
        entry: Entry,
        resolved: ResolvedRequest,
        load: LoadExecutable | None,
        started: float,
    ) -> Result | None:
        """Unpacks and loads an entry; None, counted and set aside, where that fails."""
        try:
            executable = entry.executable()
            loaded = None if load is None else load(executable)
        except CorruptEntry as error:
            self._set_aside(tiered, resolved.key, error)
            return None
        except LoadError as error:
            self._sparing.warning(f"{tiered.tier}.load", "an entry of the %s tier did not load: %s", tiered.tier, error)
            self.counters.failure(tiered.tier, "load")
            if error.blames_entry:
                self._free(tiered, resolved.key, CorruptReason.PAYLOAD)
            return None
        except MemoryError:
            self.counters.failure(tiered.tier, "memory")
            return None
        result = Result(
            key=resolved.key,
            tier=tiered.tier,
            executable=executable,
            digest=entry.digest,
            entry_bytes=entry.size_bytes,
            seconds=self._clock.monotonic() - started,
            compile_seconds=entry.header.compile_seconds,
            loaded=loaded,
        )
        self.counters.hit(tiered.tier, result.seconds_saved)
        return result

    def _set_aside(self, tiered: _Tiered, key: Key, error: CorruptEntry) -> None:
        message = "the %s tier held a bad entry for %s: %s"
        self._sparing.warning(f"{tiered.tier}.{error.kind}", message, tiered.tier, key.short, error)
        self.counters.failure(tiered.tier, error.kind)
        self._free(tiered, key, error.reason)

    def _free(self, tiered: _Tiered, key: Key, reason: CorruptReason) -> None:
        """Frees a key of a local tier. A bad entry of the remote is the service's to remove."""
        if tiered.tier is Tier.REMOTE:
            return
        if isinstance(tiered.store, SetsAside):
            tiered.store.set_aside(key, reason)
            return
        try:
            tiered.store.delete(key)
        except StoreError as error:
            self.counters.failure(tiered.tier, error.kind)

    def _keep(self, tiered: _Tiered, entry: Entry, attestation: Attestation | None) -> None:
        """Stores an entry in a local tier; a failure is counted and costs nothing else."""
        try:
            tiered.store.put(entry, attestation)
        except StoreError as error:
            topic = f"{tiered.tier}.put.{error.kind}"
            self._sparing.warning(topic, "the %s tier did not take an entry: %s", tiered.tier, error)
            self.counters.failure(tiered.tier, error.kind)
        except Exception:
            _log.exception("the %s tier did not take an entry", tiered.tier)
            self.counters.failure(tiered.tier, "internal")

    # -- compiling

    def _compile(
        self,
        resolved: ResolvedRequest,
        compiler: Compiler,
        load: LoadExecutable | None,
        progress: Callable[[float], None] | None,
        started: float,
    ) -> Result:
        compiled = self._run(compiler, resolved.request, progress)
        self._gate.compiled(compiled.compile_seconds, len(resolved.request.program))
        loaded = None if load is None else load(compiled.executable)  # what does not load is not shared
        entry = self._publish(resolved, compiled)
        return Result(
            key=resolved.key,
            tier=Tier.COMPILED,
            executable=compiled.executable,
            digest=None if entry is None else entry.digest,
            entry_bytes=0 if entry is None else entry.size_bytes,
            compile_seconds=compiled.compile_seconds,
            loaded=loaded,
            seconds=self._clock.monotonic() - started,
        )

    def _bypass(
        self,
        reason: str,
        request: Request,
        compiler: Compiler,
        load: LoadExecutable | None,
        progress: Callable[[float], None] | None,
        started: float,
    ) -> Result:
        self.counters.bypass(reason)
        compiled = self._run(compiler, request, progress)
        return Result(
            key=None,
            tier=Tier.COMPILED,
            executable=compiled.executable,
            digest=None,
            entry_bytes=0,
            compile_seconds=compiled.compile_seconds,
            bypassed=reason,
            loaded=None if load is None else load(compiled.executable),
            seconds=self._clock.monotonic() - started,
        )

    def _run(self, compiler: Compiler, request: Request, progress: Callable[[float], None] | None) -> Compiled:
        try:
            compiled = compiler.compile(request, progress=progress)
        except CompileError:
            self.counters.compile_failed()
            raise
        self.counters.compiled(compiled.compile_seconds)
        return compiled

    def _publish(self, resolved: ResolvedRequest, compiled: Compiled) -> Entry | None:
        """Stores what was compiled, nearest tier first; None where it must not be stored or could not be packed."""
        if not self.mode.publishes:
            return None
        if compiled.compiler_sha256 != resolved.request.target.compiler:
            _log.warning("the compiler's file changed under its key; the result is used and not stored")
            self.counters.not_published("compiler_changed")
            return None
        try:
            resolved.check_files()
        except Bypass as bypass:
            _log.warning("%s; the result is used and not stored", bypass.detail)
            self.counters.not_published(bypass.reason)
            return None
        try:
            entry = Entry.build(
                compiled.executable,
                key=resolved.key,
                components=resolved.components,
                executable_format=resolved.request.executable_format,
                producer=compiled.producer,
                road=compiled.road,
                compile_seconds=compiled.compile_seconds,
                created_seconds=self._clock.time(),
            )
        except (StoreError, InvalidRequest, MemoryError) as error:
            _log.warning("a compiled executable could not be packed: %s", error)
            self.counters.not_published("unpackable")
            return None
        attestation = (
            None if self._machine_key is None else Attestation.by_machine(self._machine_key, self._namespace, entry)
        )
        cheap = compiled.compile_seconds < CHEAP_COMPILE_SECONDS  # sharing it costs more than compiling it
        for tiered in self._tiers:
            if tiered.tier is Tier.DISK and cheap and self._later is not None:
                self._later.add(entry, attestation)
            elif tiered.tier is not Tier.REMOTE:
                self._keep(tiered, entry, attestation)
        if cheap:
            self.counters.not_published("cheap")
        elif self._spool is not None:
            self._spool.add(entry, durable=True)
        return entry

    # -- ending

    def drain(self, seconds: float) -> int:
        """Waits for uploads, at most `seconds`; gives how many entries still wait in the spool."""
        return 0 if self._spool is None else self._spool.drain(seconds).entries

    def close(self) -> None:
        """Ends background work and closes the tiers. What waits in the spool stays there for the next run."""
        if self._later is not None:
            self._later.close()
        if self._spool is not None:
            self._spool.close()
        for tiered in self._tiers:
            tiered.store.close()
