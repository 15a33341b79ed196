"""Puts a node together from a configuration. A part that cannot be had is left out with one warning, never an error."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchtpu_cache.compilers.registry import Compilers
from torchtpu_cache.counters import Counters
from torchtpu_cache.node import Node
from torchtpu_cache.spool import Spool, spool_folder
from torchtpu_cache_core import paths
from torchtpu_cache_core.canonical.alias import AliasStore
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.config import Config, Mode
from torchtpu_cache_core.errors import CacheError
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.stores.machine_key import machine_key
from torchtpu_cache_core.stores.memory import MemoryStore

if TYPE_CHECKING:
    from torchtpu_cache_core.store import Store
    from torchtpu_cache_core.stores.disk import DiskStore

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Assembly:
    """A node and the parts that commands ask directly.

    Args:
        folder: this machine's cache folder, or None where none can be used and all stays in memory.
    """

    config: Config
    folder: Path | None
    identities: FileIdentities
    canonicaliser: ProgramCanonicaliser
    disk: DiskStore | None
    remote: Store | None
    spool: Spool | None
    compilers: Compilers
    node: Node

    def close(self) -> None:
        """Ends the node and the helper processes."""
        self.node.close()
        self.compilers.close()
        self.canonicaliser.close()


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
    aliases = None if folder is None else AliasStore(folder / "aliases")
    canonicaliser = ProgramCanonicaliser(
        aliases, identities=identities, allowed_custom_calls=config.custom_call_targets
    )
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
        spool = Spool(
            spool_folder(folder, config.remote, config.namespace),
            remote,
            counters,
            limit_bytes=config.max_spool_bytes,
        )
        spool.resume()
    node = Node(
        resolver=canonicaliser,
        memory=MemoryStore(limit_bytes=config.max_memory_bytes),
        disk=disk,
        remote=remote,
        spool=spool,
        machine_key=key,
        namespace=config.namespace,
        mode=config.mode,
        counters=counters,
    )
    compilers = Compilers(
        identities=identities,
        memo_dir=None if folder is None else folder / "memo",
        deadline_seconds=config.compile_timeout_seconds,
    )
    return Assembly(config, folder, identities, canonicaliser, disk, remote, spool, compilers, node)
