"""The node: one object that gets an executable from the nearest tier, or has it compiled, once.

    memory ─▶ disk ─▶ remote ─▶ compile ─▶ memory, disk ─▶ spool ─▶ remote

Whatever the cache's state, a compile returns its executable whenever XLA can make it: every fault of a tier is
counted, logged, and passed by. The agent is this object behind a socket; a job may embed it.

A caller waits for what it needs and no more. What was compiled is returned at once; it is packed and stored behind its
caller's back (`later`), and until then this process finds it here. So a process that is killed in this moment loses
it, and it is compiled again; one that ends in order waits for it. A node without memory tier stores before it returns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache.later import Later
from torchtpu_cache.loglines import name_lines
from torchtpu_cache.publication import Publication
from torchtpu_cache.result import Result, Stamp
from torchtpu_cache.storing import Storing
from torchtpu_cache.tiers import Tiers
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.config import Mode
from torchtpu_cache_core.errors import Bypass, CompileError, InvalidRequest, LoadError
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key, Namespace
from torchtpu_cache_core.request import Keyed, ProgramResolver, Request, ResolvedRequest, resolve
from torchtpu_cache_core.singleflight import SingleFlight
from torchtpu_cache_core.store import Store, Stored

if TYPE_CHECKING:
    from torchtpu_cache.compilers.base import Compiled, Compiler, Progress
    from torchtpu_cache.spool import Spool

_log = logging.getLogger(__name__)
name_lines()  # here, where everything that a job can have of this package comes by

LoadExecutable = Callable[[bytes | memoryview], Any]
"""Makes an executable live, and gives it.

Raises:
    LoadError: it does not become live.
    Bypass: this process's environment has changed, which says nothing of the executable.
"""


@dataclass(frozen=True, slots=True)
class _Caller:
    """Who waits for an executable: since when, and how it is to be made live."""

    load: LoadExecutable | None
    clock: Clock
    started: float

    def loaded(self, executable: bytes | memoryview) -> Any:
        """What the caller's `load` gives, if it loads; LoadError."""
        if self.load is None:
            return None
        try:
            return self.load(executable)
        except Bypass as bypass:
            raise LoadError(str(bypass), blames_entry=False) from bypass

    def waited_seconds(self) -> float:
        return self.clock.monotonic() - self.started


@dataclass(frozen=True, slots=True)
class _Ask:
    """One call of a node that compiles: what is asked for, and how it is to be made."""

    request: Request
    compiler: Compiler
    progress: Progress | None
    caller: _Caller


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
        self.mode = mode
        self.counters = Counters() if counters is None else counters
        self._later = None if memory is None else Later()
        self._tiers = Tiers(memory, disk, remote, self.counters, clock, self._later)
        self._storing = Storing(self._tiers, self.counters, self._later, spool, machine_key, namespace)
        self._resolver = resolver
        self._spool = spool
        self._clock = clock
        self._flights: SingleFlight[Key, Result] = SingleFlight()

    def get_or_compile(
        self,
        request: Request,
        compiler: Compiler,
        *,
        load: LoadExecutable | None = None,
        progress: Progress | None = None,
    ) -> Result:
        """The executable of `request`, from the nearest tier that has it, else from `compiler`.

        Args:
            load: makes the executable live; a hit counts only once this has returned.
            progress: called about once a second with the seconds since a compile began.

        Raises:
            CompileError: XLA cannot make it. No fault of the cache is ever raised.
            LoadError: what XLA has just made does not load.
        """
        ask = self._begin(request, compiler, load, progress)
        if self.mode is Mode.OFF:
            return self._bypass("off", ask)
        try:
            resolved = resolve(request, self._resolver)
        except Bypass as bypass:
            return self._bypass(bypass.reason, ask)
        except InvalidRequest:
            return self._bypass("invalid_options", ask)
        except Exception:
            _log.exception("a key could not be made; compiling without the cache")
            return self._bypass("internal", ask)
        return self._answer(resolved, ask)

    def find(self, keyed: Keyed, *, load: LoadExecutable | None = None) -> Result | None:
        """The executable from the nearest tier that has it, for a caller that compiles for itself.

        None where no tier has one that loads, or the mode serves none: the caller compiles then, and calls `compiled`
        and `publish`. No fault of the cache is ever raised.
        """
        caller = self._caller(load)
        hit = self._look_up(keyed, caller) if self.mode.serves else None
        if hit is None:
            self.counters.missed()
        return hit

    def compiled(self, keyed: Keyed, compile_seconds: float) -> None:
        """Takes note that the caller compiled what `find` had not."""
        self.counters.compiled(compile_seconds)
        self._tiers.compiled(compile_seconds, keyed.program_bytes)

    def publish(self, keyed: Keyed, compiled: Compiled) -> Publication | None:
        """Stores what the caller compiled, as the mode allows, soon; None where it will not be stored.

        No fault of the cache is ever raised, and neither the disk nor an upload is waited for.
        """
        if not self.mode.publishes:
            return None
        try:
            return self._publish(keyed, compiled)
        except Bypass as bypass:
            _log.warning("%s; the result is used and not stored", bypass.detail)
            self.counters.not_published(bypass.reason)
        except Exception:
            _log.exception("a compiled executable could not be stored")
            self.counters.not_published("internal")
        return None

    def answer(
        self,
        resolved: ResolvedRequest,
        compiler: Compiler,
        *,
        load: LoadExecutable | None = None,
        progress: Progress | None = None,
    ) -> Result:
        """`get_or_compile` for a caller that has the key already. In mode OFF it compiles like any other bypass."""
        ask = self._begin(resolved.request, compiler, load, progress)
        return self._bypass("off", ask) if self.mode is Mode.OFF else self._answer(resolved, ask)

    def _begin(
        self, request: Request, compiler: Compiler, load: LoadExecutable | None, progress: Progress | None
    ) -> _Ask:
        return _Ask(request, compiler, progress, self._caller(load))

    def _caller(self, load: LoadExecutable | None) -> _Caller:
        self.counters.request()
        return _Caller(load, self._clock, self._clock.monotonic())

    def _answer(self, resolved: ResolvedRequest, ask: _Ask) -> Result:
        def flight() -> Result:
            hit = self._look_up(resolved, ask.caller) if self.mode.serves else None
            return hit or self._compile(resolved, ask)

        result, leader = self._flights.do(resolved.key, flight)
        return result if leader else self._join(result, resolved, ask)

    def _join(self, theirs: Result, resolved: ResolvedRequest, ask: _Ask) -> Result:
        """Uses what another thread's flight brought, as a hit in this process's memory."""
        try:
            loaded = ask.caller.loaded(theirs.executable)
        except LoadError as error:
            _log.warning("an executable that another thread got did not load: %s", error)
            self.counters.failure(Tier.MEMORY, "load")
            return self._compile(resolved, ask)
        result = replace(theirs, tier=Tier.MEMORY, seconds=ask.caller.waited_seconds(), loaded=loaded)
        self.counters.hit(Tier.MEMORY, result.seconds_saved)
        return result

    def _look_up(self, keyed: Keyed, caller: _Caller) -> Result | None:
        def use(tier: Tier, stored: Stored) -> Result:
            entry = stored.entry
            executable = entry.executable()
            loaded = caller.loaded(executable)
            hit = Result(
                key=keyed.key,
                tier=tier,
                executable=executable,
                packed=Stamp(entry.digest, entry.size_bytes),
                seconds=caller.waited_seconds(),
                compile_seconds=entry.header.compile_seconds,
                loaded=loaded,
            )
            self.counters.hit(tier, hit.seconds_saved)
            if tier is Tier.DISK and self.mode.publishes:
                self._storing.offer(stored)
            return hit

        return self._find_fresh(keyed, caller) or self._tiers.find(keyed, use)

    def _find_fresh(self, keyed: Keyed, caller: _Caller) -> Result | None:
        """What this process compiled and has not stored yet, as a hit in its memory."""
        publication = self._storing.find(keyed)
        if publication is None:
            return None
        compiled = publication.compiled
        try:
            loaded = caller.loaded(compiled.executable)
        except LoadError as error:
            _log.warning("an executable that was compiled just now did not load: %s", error)
            self.counters.failure(Tier.MEMORY, "load")
            if error.blames_entry:
                self._storing.forget(publication)
            return None
        hit = Result(
            key=keyed.key,
            tier=Tier.MEMORY,
            executable=compiled.executable,
            packed=publication,
            seconds=caller.waited_seconds(),
            compile_seconds=compiled.compile_seconds,
            loaded=loaded,
        )
        self.counters.hit(Tier.MEMORY, hit.seconds_saved)
        return hit

    def _compile(self, resolved: ResolvedRequest, ask: _Ask) -> Result:
        self.counters.missed()
        compiled = self._run(ask)
        self.compiled(resolved, compiled.compile_seconds)
        loaded = ask.caller.loaded(compiled.executable)  # what does not load is not shared
        packed = self.publish(resolved, compiled)
        return Result(
            key=resolved.key,
            tier=Tier.COMPILED,
            executable=compiled.executable,
            packed=packed,
            compile_seconds=compiled.compile_seconds,
            loaded=loaded,
            seconds=ask.caller.waited_seconds(),
        )

    def _bypass(self, reason: str, ask: _Ask) -> Result:
        self.counters.bypass(reason)
        compiled = self._run(ask)
        self.counters.compiled(compiled.compile_seconds)
        return Result(
            key=None,
            tier=Tier.COMPILED,
            executable=compiled.executable,
            packed=None,
            compile_seconds=compiled.compile_seconds,
            bypassed=reason,
            loaded=ask.caller.loaded(compiled.executable),
            seconds=ask.caller.waited_seconds(),
        )

    def _run(self, ask: _Ask) -> Compiled:
        try:
            return ask.compiler.compile(ask.request, progress=ask.progress)
        except CompileError:
            self.counters.compile_failed()
            raise

    def _publish(self, keyed: Keyed, compiled: Compiled) -> Publication:
        """Raises Bypass where what was compiled is not what its key says."""
        if compiled.compiler_sha256 != keyed.compiler:
            raise Bypass("compiler_changed", "the compiler's file changed under its key")
        keyed.check_files()  # now: a file that is changed back meanwhile would look as if it never changed
        publication = Publication(keyed, compiled, self._clock.time())
        self._storing.add(publication)
        return publication

    @property
    def storing(self) -> int:
        """How many executables were compiled in this process and are not in the tiers yet."""
        return self._storing.unstored

    def flush(self) -> bool:
        """Waits until what was compiled or fetched so far is stored on this machine, a few seconds at most.

        Whether nothing waits any more.
        """
        return self._later is None or self._later.flush()

    def drain(self, seconds: float) -> int:
        """Flushes, and waits for uploads, at most `seconds`; gives how many entries still wait in the spool."""
        self.flush()
        return 0 if self._spool is None else self._spool.drain(seconds).entries

    def close(self) -> None:
        """Flushes, ends background work, closes the tiers. What waits in the spool stays there for the next run."""
        if self._later is not None:
            self._later.close()
        if self._spool is not None:
            self._spool.close()
        self._tiers.close()
