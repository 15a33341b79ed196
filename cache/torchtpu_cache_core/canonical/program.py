"""The identity of a program: by alias, by canonical form, or by its raw bytes, in this order.

The canonicaliser runs in a child process. Whatever happens to it, the program is at worst hashed as it stands or
bypassed. Only the hashed form is canonical: XLA always gets the program as it came.
"""

from __future__ import annotations

import hashlib
import math
import os
import site
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core.canonical.alias import AliasStore, alias_name
from torchtpu_cache_core.canonical.allowlist import AllowList
from torchtpu_cache_core.canonical.forms import FORM_VERSION, MEMORY_VARIABLE, ProgramFacts
from torchtpu_cache_core.canonical.scan import SCAN_VERSION, scan, text_count
from torchtpu_cache_core.child import ChildDied, ChildProcess, ChildTimeout
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.jaxlib_library import jaxlib_library
from torchtpu_cache_core.key import SCHEME
from torchtpu_cache_core.request import ProgramIdentity
from torchtpu_cache_core.singleflight import SingleFlight

__all__ = ["ProgramCanonicaliser", "ProgramFacts", "ProgramLayout"]

MAX_PROGRAM_BYTES: Final = 1 << 30
DEADLINE_SECONDS: Final = 60.0
MEMORY_BYTES: Final = 8 << 30
REST_SECONDS: Final = 300.0
"""How long a program that the child left open is not tried again, nor any program after several such in a row."""

_CHILD: Final = "torchtpu_cache_core.canonical.canonicaliser_child"
_ATTEMPTS: Final = 2
_MAX_FAILURES: Final = 3
_MAX_REMEMBERED: Final = 4096
_PASSED_ON: Final = ("PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")

_SHARDY: Final = b"sdy."
"""Begins the names of Shardy's operations and attributes, in text and in the strings of bytecode."""

_Verdict = ProgramFacts | Bypass


@dataclass(frozen=True, slots=True)
class ProgramLayout:
    """How a module is to be partitioned: its own counts, one each where it says nothing."""

    num_replicas: int
    num_partitions: int
    uses_shardy: bool


class ProgramCanonicaliser:
    """Resolves programs to their identities. Thread-safe; a `request.ProgramResolver`.

    Args:
        aliases: where answers are kept between processes; None keeps them in this process only.
        identities: for the digest of jaxlib's library, which aliases depend on.
        allowed_custom_calls: targets beside the written allow-list.
        deadline_seconds: for one program in the child.
        memory_bytes: address space of the child.
        clock: for how long the child rests after failures.

    Raises:
        ConfigError: an allowed target is malformed or a host callback.
    """

    def __init__(
        self,
        aliases: AliasStore | None,
        *,
        identities: FileIdentities | None = None,
        allowed_custom_calls: Iterable[str] = (),
        deadline_seconds: float = DEADLINE_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._aliases = aliases
        self._allow_list = AllowList.of(allowed_custom_calls)
        self._deadline_seconds = deadline_seconds
        self._library = jaxlib_library()
        self._identities = identities or FileIdentities(None)
        self._canonicaliser: str | None = None
        self._child = helper_process(memory_bytes)
        self._clock = clock
        self._failures = 0  # requests in a row that the child left open
        self._resting_until = -math.inf
        self._flights = SingleFlight[str, _Verdict]()
        self._remembered: OrderedDict[str, tuple[_Verdict, float]] = OrderedDict()
        self._lock = threading.RLock()  # guards _remembered; never held while anything is read or parsed

    @property
    def child_pid(self) -> int | None:
        """Of the helper process while it runs; None where none does."""
        return self._child.pid

    def resolve(self, program: bytes) -> ProgramIdentity:
        """The identity of `program`.

        Raises:
            Bypass: as `facts`.
        """
        return self.facts(program).identity

    def facts(self, program: bytes) -> ProgramFacts:
        """Identity of `program`, and what it says of replicas, partitions and custom calls.

        Raises:
            Bypass: `host_callback`, `custom_call_unlisted`, `unparsed_custom_call`, `unscannable` or
                `program_too_large`.
        """
        if len(program) > MAX_PROGRAM_BYTES:
            raise Bypass("program_too_large", f"the program has {len(program):,} bytes")
        raw = hashlib.sha256(program).hexdigest()
        verdict = self._recall(raw)
        if verdict is None:
            verdict, _ = self._flights.do(raw, lambda: self._found(program, raw))
        if isinstance(verdict, Bypass):
            # A raised exception carries its traceback, so each caller gets one of its own.
            raise Bypass(verdict.reason, verdict.detail)
        return verdict

    def layout(self, program: bytes) -> ProgramLayout:
        """How the module is to be partitioned, also of a program that must not be cached; never raises."""
        try:
            facts: ProgramFacts | None = self.facts(program)
        except Bypass:
            answer = None if self._library is None else self._ask(program)
            facts = None if answer is None else ProgramFacts.from_json(answer)
        if facts is None:
            return _scanned_layout(program)
        return ProgramLayout(facts.num_replicas or 1, facts.num_partitions or 1, facts.uses_shardy)

    def close(self) -> None:
        """Ends the helper process; a later call starts another."""
        self._child.close()

    def _found(self, program: bytes, raw: str) -> _Verdict:
        name = self._alias(raw)
        record = self._aliases.get(name) if self._aliases is not None and name is not None else None
        verdict = None if record is None else _verdict(record)
        lasting = True
        if verdict is None:
            verdict, lasting = self._judge(program)
            if lasting and self._aliases is not None and name is not None:
                self._aliases.put(name, _record(verdict))
        self._remember(raw, verdict, lasting=lasting)
        return verdict

    def _judge(self, program: bytes) -> tuple[_Verdict, bool]:
        """The verdict, and whether the same program would get it again."""
        if self._library is None:
            return _scanned(program), True
        answer = self._ask(program)
        if answer is None:
            # That says nothing of the program: with more room or time it may be read.
            return _scanned(program), False
        facts = ProgramFacts.from_json(answer)
        if facts is None:
            return _scanned(program), True
        try:
            self._allow_list.check(facts.custom_calls)
        except Bypass as bypass:
            return bypass, True
        return facts, True

    def _ask(self, program: bytes) -> dict[str, Any] | None:
        """What the child says; None where it gave no answer."""
        if self._clock.monotonic() < self._resting_until:
            return None
        for _ in range(_ATTEMPTS):
            try:
                answer, _ = self._child.call({}, program, deadline_seconds=self._deadline_seconds)
            except ChildDied:
                continue  # it may have been killed for the sake of others
            except (ChildTimeout, OSError):
                break
            self._failures = 0
            return answer
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            # A jaxlib that cannot work here must not cost every program its attempts.
            self._resting_until = self._clock.monotonic() + REST_SECONDS
        return None

    def _alias(self, raw: str) -> str | None:
        if self._canonicaliser is None:
            try:
                library = "none" if self._library is None else self._identities.sha256(self._library)
            except Bypass:
                return None  # without jaxlib's identity an alias could outlive the jaxlib that it is right for
            self._canonicaliser = f"form {FORM_VERSION} scan {SCAN_VERSION} jaxlib {library}"
        return alias_name(SCHEME, self._canonicaliser, self._allow_list.identity, raw)

    def _recall(self, raw: str) -> _Verdict | None:
        with self._lock:
            verdict, until = self._remembered.get(raw, (None, 0.0))
            if verdict is None or self._clock.monotonic() >= until:
                return None
            self._remembered.move_to_end(raw)
            return verdict

    def _remember(self, raw: str, verdict: _Verdict, *, lasting: bool) -> None:
        until = math.inf if lasting else self._clock.monotonic() + REST_SECONDS
        with self._lock:
            self._remembered[raw] = (verdict, until)
            self._remembered.move_to_end(raw)
            while len(self._remembered) > _MAX_REMEMBERED:
                self._remembered.popitem(last=False)


def _scanned(program: bytes) -> _Verdict:
    try:
        identity = scan(program)
    except Bypass as bypass:
        return bypass
    return ProgramFacts(
        identity=identity,
        num_replicas=text_count(program, "mhlo.num_replicas"),
        num_partitions=text_count(program, "mhlo.num_partitions"),
        uses_shardy=_SHARDY in program,
        custom_calls=(),
    )


def _scanned_layout(program: bytes) -> ProgramLayout:
    replicas, partitions = (text_count(program, f"mhlo.num_{what}") or 1 for what in ("replicas", "partitions"))
    return ProgramLayout(replicas, partitions, _SHARDY in program)


def _record(verdict: _Verdict) -> dict[str, Any]:
    if isinstance(verdict, Bypass):
        return {"bypass": verdict.reason, "detail": verdict.detail}
    return {"facts": verdict.to_json()}


def _verdict(record: Mapping[str, Any]) -> _Verdict | None:
    reason, detail, facts = record.get("bypass"), record.get("detail"), record.get("facts")
    if isinstance(reason, str) and isinstance(detail, str):
        return Bypass(reason, detail)
    return ProgramFacts.from_json(facts) if isinstance(facts, dict) else None


def helper_process(memory_bytes: int = MEMORY_BYTES) -> ChildProcess:
    """The process that parses programs, started at its first call; `memory_bytes` of address space."""
    return ChildProcess(_CHILD, _child_environ(os.environ, memory_bytes))


def _child_environ(environ: Mapping[str, str], memory_bytes: int) -> dict[str, str]:
    """A small environment: no flag or variable of the job changes what the canonicaliser says."""
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    root = str(Path(__file__).resolve().parents[2])
    # Found by the child as it is here; site-packages stay where they are, since in front they would hide the stdlib.
    if root not in (*site.getsitepackages(), site.getusersitepackages()):
        passed["PYTHONPATH"] = os.pathsep.join(filter(None, (root, passed.get("PYTHONPATH"))))
    return passed | {
        "LC_ALL": "C.UTF-8",
        "PYTHONSAFEPATH": "1",  # a module of the working directory's must not stand in for one of ours
        MEMORY_VARIABLE: str(memory_bytes),
    }
