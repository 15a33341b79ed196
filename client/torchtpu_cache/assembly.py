"""Puts a node together from a configuration. A part that cannot be had is left out with one warning, never an error."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from torchtpu_cache.counters import Counters
from torchtpu_cache.node import Node
from torchtpu_cache_core import paths
from torchtpu_cache_core.canonical.allowlist import AllowList
from torchtpu_cache_core.config import Config, Mode
from torchtpu_cache_core.errors import CacheError
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.stores.memory import MemoryStore

if TYPE_CHECKING:
    from torchtpu_cache.compilers.registry import Compilers
    from torchtpu_cache.spool import Spool
    from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
    from torchtpu_cache_core.request import ProgramIdentity
    from torchtpu_cache_core.store import Store
    from torchtpu_cache_core.stores.disk import DiskStore

_log = logging.getLogger(__name__)


class Programs:
    """What parses and compiles, made at its first use: a job that brings its own keys, such as JAX's, needs neither.

    Thread-safe.

    Args:
        folder: this machine's cache folder, or None.
    """

    def __init__(self, config: Config, folder: Path | None, identities: FileIdentities) -> None:
        self._config = config
        self._folder = folder
        self._identities = identities
        self._lock = threading.RLock()  # guards the two below
        self._canonicaliser: ProgramCanonicaliser | None = None
        self._compilers: Compilers | None = None

    @property
    def canonicaliser(self) -> ProgramCanonicaliser:
        from torchtpu_cache_core.canonical.alias import AliasStore
        from torchtpu_cache_core.canonical.program import ProgramCanonicaliser

        with self._lock:
            if self._canonicaliser is None:
                self._canonicaliser = ProgramCanonicaliser(
                    None if self._folder is None else AliasStore(self._folder / "aliases"),
                    identities=self._identities,
                    allowed_custom_calls=self._config.custom_call_targets,
                )
            return self._canonicaliser

    @property
    def compilers(self) -> Compilers:
        from torchtpu_cache.compilers.registry import Compilers

        with self._lock:
            if self._compilers is None:
                self._compilers = Compilers(
                    identities=self._identities,
                    memo_dir=None if self._folder is None else self._folder / "memo",
                    deadline_seconds=self._config.compile_timeout_seconds,
                )
            return self._compilers

    def resolve(self, program: bytes) -> ProgramIdentity:
        """As `ProgramCanonicaliser.resolve`."""
        return self.canonicaliser.resolve(program)

    def close(self) -> None:
        """Ends the helper processes."""
        with self._lock:
            if self._compilers is not None:
                self._compilers.close()
            if self._canonicaliser is not None:
                self._canonicaliser.close()


class Assembly:
    """A node and the parts that commands ask directly.

    Args:
        folder: this machine's cache folder, or None where none can be used and all stays in memory.
    """

    def __init__(
        self,
        *,
        config: Config,
        folder: Path | None,
        identities: FileIdentities,
        programs: Programs,
        disk: DiskStore | None,
        remote: Store | None,
        spool: Spool | None,
        node: Node,
    ) -> None:
        self.config = config
        self.folder = folder
        self.identities = identities
        self.disk = disk
        self.remote = remote
        self.spool = spool
        self.node = node
        self._programs = programs

    @property
    def canonicaliser(self) -> ProgramCanonicaliser:
        return self._programs.canonicaliser

    @property
    def compilers(self) -> Compilers:
        return self._programs.compilers

    def close(self) -> None:
        """Ends the node and the helper processes."""
        self.node.close()
        self._programs.close()


def cache_folder(config: Config) -> Path | None:
    """The cache folder, private and usable, or None with one warning."""
    try:
        return paths.ensure_private_dir(config.dir)
    except CacheError as error:
        _log.warning("%s; keeping everything in memory", error)
        return None


def open_disk(config: Config, folder: Path, key: bytes | None = None) -> DiskStore:
    """The disk tier in `folder`. With the machine's `key`, what it marked is held against that."""
    from torchtpu_cache_core.stores.disk import DiskStore

    return DiskStore(
        folder,
        config.namespace,
        limit_bytes=config.max_disk_bytes,
        limit_entries=config.max_disk_entries,
        min_free_bytes=config.min_free_bytes,
        machine_key=key,
    )


def _key_of(folder: Path) -> bytes | None:
    try:
        return machine_key(folder)
    except CacheError as error:  # a folder that is only read here
        _log.warning("what is compiled here gets no mark of this machine: %s", error)
        return None


def open_remote(config: Config) -> Store | None:
    """The remote behind its breaker, or None where none is configured.

    Raises:
        ConfigError: the URL is not one that may be used.
    """
    if config.remote is None:
        return None
    from torchtpu_cache.breaker import BreakerStore
    from torchtpu_cache.remote import RemoteStore

    return BreakerStore(RemoteStore(config.remote, config.namespace))


def assemble(config: Config) -> Assembly:
    """All parts for `config`.

    Raises:
        ConfigError: the remote's URL is not one that may be used, or an allowed custom call is none.
    """
    folder = None if config.mode is Mode.OFF else cache_folder(config)
    identities = FileIdentities(None if folder is None else folder / "memo")
    AllowList.of(config.custom_call_targets)  # what is refused is refused now
    programs = Programs(config, folder, identities)
    disk, key = None, None
    if folder is not None:
        key = _key_of(folder)
        try:
            disk = open_disk(config, folder, key)
        except CacheError as error:
            _log.warning("the disk tier cannot be used: %s", error)
    counters = Counters()
    remote = None if config.mode is Mode.OFF else open_remote(config)
    spool = None
    if remote is not None and folder is not None and config.remote is not None and config.mode.publishes:
        from torchtpu_cache.spool import Spool, spool_folder

        spool = Spool(
            spool_folder(folder, config.remote, config.namespace),
            remote,
            counters,
            limit_bytes=config.max_spool_bytes,
        )
        spool.resume()
    node = Node(
        resolver=programs,
        memory=MemoryStore(limit_bytes=config.max_memory_bytes),
        disk=disk,
        remote=remote,
        spool=spool,
        machine_key=key,
        namespace=config.namespace,
        mode=config.mode,
        counters=counters,
    )
    return Assembly(
        config=config,
        folder=folder,
        identities=identities,
        programs=programs,
        disk=disk,
        remote=remote,
        spool=spool,
        node=node,
    )
