"""A node in a folder of its own, whose every answer is checked and timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.fakes import FakeCompiler, RawResolver, request
from torchtpu_cache.breaker import BreakerStore
from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache.node import Node
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache.spool import Spool
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.request import Request, ResolvedRequest, resolve
from torchtpu_cache_core.store import PutOutcome, PutStatus, Store
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.files import FILES, Files
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.stores.memory import MemoryStore
from torchtpu_cache_core.testing.entries import executable_for

PROGRAM_BYTES = 2000
SETTLE_SECONDS = 120.0


def program(name: str) -> ResolvedRequest:
    """A made-up program with its key; the same name gives the same."""
    return resolve(request(name.encode() + b" " + b"x" * PROGRAM_BYTES), RawResolver())


class Rig:
    """A node with the tiers of a real job, and a compiler that takes no time and says that it took a second.

    So whatever an answer takes is the cache's doing. Memory holds nothing, unless it is asked for: a second look-up
    shall reach the tiers that the drill is about.

    Args:
        folder: of disk tier and spool; None for a node without them.
        remote: the URL of a service, or a store to take its place without a breaker; None for none.
        executable_bytes: of what is compiled; it does not compress.
    """

    def __init__(
        self,
        folder: Path | None,
        remote: str | Store | None = None,
        *,
        files: Files = FILES,
        clock: Clock = SYSTEM_CLOCK,
        limit_bytes: int = 1 << 30,
        min_free_bytes: int = 0,
        memory: bool = False,
        executable_bytes: int = 20_000,
    ) -> None:
        self.compiler = NoisyCompiler(size=executable_bytes)
        self.counters = Counters()
        self.wrong = 0
        self.lost = 0
        self.answers = 0
        self.disk: CountingDisk | None = None
        self.breaker: BreakerStore | None = None
        self.spool: Spool | None = None
        key = None
        if folder is not None:
            key = machine_key(folder)
            self.disk = CountingDisk(
                folder,
                DEFAULT_NAMESPACE,
                limit_bytes=limit_bytes,
                limit_entries=100_000,
                min_free_bytes=min_free_bytes,
                clock=clock,
                files=files,
                machine_key=key,
            )
        if isinstance(remote, str):
            remote = self.breaker = BreakerStore(RemoteStore(remote, DEFAULT_NAMESPACE, clock=clock), clock=clock)
        if remote is not None and folder is not None:
            self.spool = Spool(folder / "spool", remote, self.counters, limit_bytes=1 << 30, clock=clock)
        self.node = Node(
            resolver=RawResolver(),
            memory=MemoryStore(limit_bytes=1 << 28) if memory else None,
            disk=self.disk,
            remote=remote,
            spool=self.spool,
            machine_key=key,
            counters=self.counters,
            clock=clock,
        )

    def ask(self, resolved: ResolvedRequest) -> tuple[float, Tier | None]:
        """Milliseconds that the answer took, and its tier; None, and counted, where there was none."""
        self.answers += 1
        started = time.perf_counter()
        try:
            result = self.node.answer(resolved, self.compiler)
        except Exception:
            self.lost += 1
            return (time.perf_counter() - started) * 1000, None
        taken = (time.perf_counter() - started) * 1000
        self.wrong += bytes(result.executable) != self.compiler.executable(resolved.request)
        return taken, result.tier

    def settle(self) -> None:
        """Waits until all that was asked for is stored or has failed; a disk in trouble may take its time."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self.node.flush():
            assert time.monotonic() < deadline, "what waits for the disk does not get through"

    def totals(self) -> dict[str, Any]:
        """What the node counted so far."""
        return self.counters.snapshot()

    def close(self) -> None:
        self.node.close()


class CountingDisk(DiskStore):
    """A disk tier that knows what it took; `created` is changed by one thread of a node at a time."""

    created = 0

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        outcome = super().put(entry, attestation)
        self.created += outcome.status is PutStatus.CREATED
        return outcome


class NoisyCompiler(FakeCompiler):
    """Executables of `size` bytes that do not compress, the same for the same request every time."""

    def executable(self, request: Request) -> bytes:
        return executable_for(request.program.decode(), self.size)


@contextmanager
def rigged(*arguments: Any, **options: Any) -> Iterator[Rig]:
    """A `Rig` for the time of the block."""
    rig = Rig(*arguments, **options)
    try:
        yield rig
    finally:
        rig.close()


def private(folder: Path) -> Path:
    """A new folder that only this user may write to."""
    folder.mkdir(mode=0o700)
    return folder


def median_or_nan(values: Iterable[float]) -> float:
    """The median; NaN of nothing."""
    found = list(values)
    return statistics.median(found) if found else float("nan")
