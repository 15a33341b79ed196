"""A machine with a service beside it, and the ways to get one program that both have: warm, and by hand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import zstandard

from support.clean import clean_folder
from support.figures import Figure
from support.rounds import Rounds, Stopwatch, Taken
from support.service import running_service
from torchtpu_cache.api import CompiledProgram, compile_with
from torchtpu_cache.assembly import Assembly, Programs, assemble, open_disk
from torchtpu_cache.compilers.base import Compiler
from torchtpu_cache.compilers.registry import Compilers
from torchtpu_cache.counters import Tier
from torchtpu_cache.node import Node
from torchtpu_cache_core import config
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.entry import PREFIX, Entry, Frame
from torchtpu_cache_core.stores.layout import Layout
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.stores.memory import MemoryStore

CORPUS = Path(__file__).parents[1] / "data" / "corpus"


def module(name: str) -> bytes:
    """One real StableHLO module."""
    return (CORPUS / f"{name}.mlirbc").read_bytes()


@dataclass(frozen=True)
class Bar:
    """At most so many times the floor; where the floor is small, at most so much more than it."""

    ratio: float
    extra_seconds: float

    def figure(self, name: str, rounds: Rounds, way: str, floor: str, **more: object) -> Figure:
        """Held to the ratio from the size on at which it allows more than the other bar."""
        shown = {**rounds.told(way, floor), **more}
        ratio, extra = rounds.ratio(way, floor), rounds.extra(way, floor)
        if rounds.median(floor) * (self.ratio - 1) >= self.extra_seconds:
            return Figure.at_most(name, ratio, "ratio", self.ratio, **shown, extra_ms=round(extra * 1000, 2))
        return Figure.at_most(name, extra * 1000, "ms", self.extra_seconds * 1000, **shown, ratio=round(ratio, 3))


class ForTarget(Protocol):
    """What `compile_with` needs of compilers."""

    def for_target(self, target_name: str, /) -> Compiler: ...


class _Programs(Programs):
    """Those of a machine, with something else in the compilers' place."""

    def __init__(self, of: Assembly, compilers: ForTarget) -> None:
        super().__init__(of.config, of.folder, of.identities)
        self._of = of
        self._stand_in = cast("Compilers", compilers)

    @property
    def canonicaliser(self) -> ProgramCanonicaliser:
        return self._of.canonicaliser

    @property
    def compilers(self) -> Compilers:
        return self._stand_in


class Machine:
    """A warm process: its tiers but memory are filled, its connection is open, its programs have aliases.

    Every look-up goes through a node of its own, so that its memory tier is empty.
    """

    def __init__(self, assembly: Assembly, folder: Path) -> None:
        self.assembly = assembly
        self._folder = folder
        self._count = 0
        assert assembly.folder is not None
        self.cache = assembly.folder
        self._machine_key = machine_key(assembly.folder)

    def compile(self, program: bytes, target: str, node: Node) -> CompiledProgram:
        """`torchtpu_cache.compile` through this node."""
        return compile_with(self._assembled(node, self.assembly.compilers), program, target=target)

    def with_compilers(self, compilers: ForTarget) -> Assembly:
        """The machine's parts, with something else in the compilers' place."""
        return self._assembled(self.assembly.node, compilers)

    def _assembled(self, node: Node, compilers: ForTarget) -> Assembly:
        own = self.assembly
        return Assembly(
            config=own.config,
            folder=own.folder,
            identities=own.identities,
            programs=_Programs(own, compilers),
            disk=own.disk,
            remote=own.remote,
            spool=own.spool,
            node=node,
        )

    def publish(self, program: bytes, target: str) -> CompiledProgram:
        """Sees to it that the disk tier and the service have the program."""
        compiled = self.compile(program, target, self.assembly.node)
        waiting = self.assembly.node.drain(60)
        if waiting:
            raise RuntimeError(f"{waiting} entries did not reach the service")
        return compiled

    def disk_hit(self, program: bytes, target: str, use: Callable[[CompiledProgram], object]) -> Taken:
        """From asking to what `use` gives, with the program on disk."""
        assembly = self.assembly
        node = self._node(disk=assembly.disk, remote=assembly.remote, spool=assembly.spool)
        return self._timed(program, target, node, Tier.DISK, use)

    def remote_hit(self, program: bytes, target: str, use: Callable[[CompiledProgram], object]) -> Taken:
        """From asking to what `use` gives, with the program at the service and an empty disk tier."""
        self._count += 1
        folder = self._folder / f"empty-{self._count}"
        folder.mkdir(mode=0o700)
        disk = open_disk(self.assembly.config, folder)
        node = self._node(disk=disk, remote=self.assembly.remote)
        try:
            return self._timed(program, target, node, Tier.REMOTE, use)
        finally:
            node.flush()
            shutil.rmtree(folder)

    def _timed(
        self, program: bytes, target: str, node: Node, tier: Tier, use: Callable[[CompiledProgram], object]
    ) -> Taken:
        watch = Stopwatch()
        compiled = self.compile(program, target, node)
        used = use(compiled)
        taken = watch.stop()
        if compiled.tier is not tier:
            raise RuntimeError(f"a hit of the {tier} tier was to be measured, and it came from {compiled.tier}")
        del used
        return taken

    def _node(self, **tiers: object) -> Node:
        return Node(
            resolver=self.assembly.canonicaliser,
            memory=MemoryStore(limit_bytes=self.assembly.config.max_memory_bytes),
            machine_key=self._machine_key,
            namespace=self.assembly.config.namespace,
            **tiers,  # type: ignore[arg-type]
        )


@contextmanager
def machine(cache: Path | None = None) -> Iterator[Machine]:
    """A new machine, and a new service in a process of its own.

    Args:
        cache: a cache folder that the machine begins with a copy of.
    """
    with clean_folder() as folder, running_service(folder / "service") as service:
        if cache is not None:
            shutil.copytree(cache, folder / "cache")
        assembly = assemble(config.load({"dir": folder / "cache", "remote": service.url}).config)
        try:
            yield Machine(assembly, folder)
        finally:
            assembly.close()


class Floor:
    """What nobody can do without: read the entry's file, unpack it in one call. Nothing is checked."""

    def __init__(self, here: Machine, compiled: CompiledProgram) -> None:
        assert compiled.key is not None
        self._path = Layout(here.cache, here.assembly.config.namespace).entry(compiled.key)
        raw = self._path.read_bytes()
        frame = Frame.parse(raw[: PREFIX.size])
        self._payload = slice(frame.payload_offset, frame.trailer_offset)
        self.entry_bytes = frame.entry_bytes
        self.executable_bytes = len(compiled.executable)
        if Entry.parse(raw[: frame.entry_bytes]).header.codec != "zstd":
            raise RuntimeError("the entry is not compressed, so there is nothing to unpack")
        if self.executable() != bytes(compiled.executable):
            raise RuntimeError("the floor unpacks other bytes than the cache")

    def executable(self) -> bytes:
        """Read and unpacked."""
        with open(self._path, "rb") as file:
            raw = file.read()
        return zstandard.ZstdDecompressor().decompress(memoryview(raw)[self._payload])
