"""Honest entries that a drill damages, the compiler that knows what each must give, and a loader that takes notes."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass
from functools import cached_property

from support.fakes import FakeCompiler, FakeLoaded, RawResolver, request, target
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.request import Request, ResolvedRequest, resolve
from torchtpu_cache_core.testing.entries import CREATED_SECONDS

TARGETS = [target(device_kind=f"chip {number}", platform_version=str(number)) for number in range(3)]


@dataclass(frozen=True)
class Victim:
    """A request, what its compile gives, and the entry of it. No two executables are equally long."""

    name: str
    resolved: ResolvedRequest
    executable: bytes

    @property
    def key(self) -> Key:
        return self.resolved.key

    @cached_property
    def entry(self) -> Entry:
        return Entry.build(
            self.executable,
            components=self.resolved.components,
            executable_format=self.resolved.request.executable_format,
            producer="drill 1",
            road="client",
            compile_seconds=1.0,
            created_seconds=CREATED_SECONDS,
        )

    @cached_property
    def raw(self) -> bytes:
        """The entry's bytes."""
        return bytes(self.entry.buffer)


def victim(name: str, size_bytes: int, *, packs: bool) -> Victim:
    """One of this name; `packs` makes its executable shrink by a quarter, so that it is stored with zstd."""
    rng = random.Random(name)
    noise = rng.randbytes(size_bytes)
    executable = base64.b64encode(noise)[:size_bytes] if packs else noise
    asked = resolve(request(name.encode(), of=rng.choice(TARGETS)), RawResolver())
    return Victim(name, asked, executable)


def victims(count: int, *, large: int = 0, name: str = "victim") -> list[Victim]:
    """So many small ones, every other of which is packed, then so many `large` ones of 1.5 to 3 MB."""
    small = [victim(f"{name} {i}", 1200 + 7 * i, packs=i % 2 == 0) for i in range(count)]
    return small + [victim(f"{name} large {i}", (3 << 19) + (i << 18) + i, packs=i % 2 == 0) for i in range(large)]


class KnowingCompiler(FakeCompiler):
    """Gives each victim's own executable, and says that the compile took a second."""

    def __init__(self, known: list[Victim]) -> None:
        super().__init__()
        self._known = {each.resolved.request.program: each.executable for each in known}

    def executable(self, request: Request) -> bytes:
        return self._known[request.program]


class Recorder:
    """A loader that keeps every byte string that it is given."""

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    def __call__(self, executable: bytes | memoryview) -> FakeLoaded:
        self.loaded.append(bytes(executable))
        return FakeLoaded({})

    def take(self) -> list[bytes]:
        """What was loaded since the last call."""
        taken, self.loaded = self.loaded, []
        return taken
