"""A compiler that is quick, counts, and says in its bytes what they were really compiled for; stores that fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torchtpu_cache.compilers.base import Compiled, Compiler, Loaded
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import Bypass, CompileError, LoadError
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.request import FORMAT_PJRT, ProgramIdentity, Request, Target
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, Store, Stored, StoreStats

OPTIONS = encode_options(use_spmd_partitioning=False)


def target(**parts: str) -> Target:
    """A made-up target; parts given replace the made-up ones."""
    return Target.of("fake", {"platform": "fake", "platform_version": "1", "compiler": "c" * 64, **parts})


def request(
    program: bytes = b"module {}", *, environ: dict[str, str] | None = None, of: Target | None = None
) -> Request:
    """A request for a made-up target in a made-up environment."""
    return Request(
        program=program,
        options=OPTIONS,
        target=of or target(),
        environment=Environment.snapshot(environ or {}, []),
        executable_format=FORMAT_PJRT,
    )


class RawResolver:
    """Takes program bytes as they are; bypasses what starts with `callback`."""

    def resolve(self, program: bytes) -> ProgramIdentity:
        import hashlib

        if program.startswith(b"callback"):
            raise Bypass("host_callback", "a made-up callback")
        return ProgramIdentity("raw", hashlib.sha256(program).hexdigest(), len(program))


class FakeLoaded(Loaded):
    """What `FakeCompiler.load` gives: the facts that the executable was compiled for."""

    def __init__(self, facts: dict[str, object]) -> None:
        self.facts = facts

    @property
    def device_ids(self) -> tuple[int, ...]:
        return (0,)

    def parameter_shapes(self) -> tuple[()]:
        return ()

    def execute(self, inputs: Sequence[object]) -> list[object]:  # type: ignore[override]
        return []


class FakeCompiler(Compiler):
    """Compiles in `seconds`; its executables name program, target and flags, and its loader checks them."""

    executable_format = FORMAT_PJRT

    def __init__(self, *, seconds: float = 1.0, sleep: float = 0.0, size: int = 100, sha256: str = "c" * 64) -> None:
        self.seconds = seconds
        self.sleep = sleep
        self.size = size
        self.sha256 = sha256
        self.calls: list[bytes] = []
        self.fails: list[bool] = []
        self.bad_loads: set[bytes] = set()
        self.loads = 0
        self._lock = threading.Lock()

    def describe(self, name: str, options: bytes, environment: Environment) -> Target:
        return target()

    def compile(self, request: Request, *, progress: Callable[[float], None] | None = None) -> Compiled:
        with self._lock:
            self.calls.append(request.program)
            fails = bool(self.fails) and self.fails.pop(0)
        time.sleep(self.sleep)
        if fails:
            raise CompileError("made to fail")
        return Compiled(
            executable=self.executable(request),
            compile_seconds=self.seconds,
            producer="fake 1",
            road="client",
            compiler_sha256=self.sha256,
        )

    def executable(self, request: Request) -> bytes:
        """What a compile of `request` gives: the same every time."""
        return json.dumps(self._facts(request)).encode() + b"\0" * self.size

    def _facts(self, request: Request) -> dict[str, object]:
        return {
            "program": request.program.hex(),
            "target": list(map(list, request.target.parts)),
            "flags": [[component.name, component.shown] for component in request.environment.components()],
        }

    def load(self, executable: bytes | memoryview, request: Request) -> FakeLoaded:
        with self._lock:
            self.loads += 1
        raw = bytes(executable)
        if raw in self.bad_loads:
            raise LoadError("made to fail")
        facts = json.loads(raw.rstrip(b"\0"))
        assert facts == self._facts(request), "a wrong hit"
        return FakeLoaded(facts)


class FailingStore(Store):
    """Raises what it is told to, from every call."""

    def __init__(self, error: Exception, name: str = "failing") -> None:
        self.error = error
        self.name = name
        self.asked = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name=self.name)

    def _fail(self) -> Exception:
        self.asked += 1
        return self.error

    def get(self, key: Key) -> Stored | None:
        raise self._fail()

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        raise self._fail()

    def contains(self, key: Key) -> bool:
        raise self._fail()

    def delete(self, key: Key) -> bool:
        raise self._fail()

    def iterate(self) -> Iterator[EntryInfo]:
        raise self._fail()

    def stats(self) -> StoreStats:
        raise self._fail()
