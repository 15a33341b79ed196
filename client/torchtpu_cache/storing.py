"""What was compiled here, from its compile until the tiers have it."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from torchtpu_cache_core.errors import InvalidRequest, StoreError
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.perprocess import PerProcess

if TYPE_CHECKING:
    from torchtpu_cache.counters import Counters
    from torchtpu_cache.later import Later
    from torchtpu_cache.publication import Publication
    from torchtpu_cache.spool import Spool
    from torchtpu_cache.tiers import Tiers
    from torchtpu_cache_core.entry import Entry
    from torchtpu_cache_core.names import Key, Namespace
    from torchtpu_cache_core.request import Keyed
    from torchtpu_cache_core.store import Stored

_log = logging.getLogger(__name__)


class Storing:
    """Packs and stores what was compiled, and has it for who asks meanwhile. Thread-safe, and safe to use after a fork.

    No fault of the cache leaves it: what cannot be stored is counted and logged.

    Args:
        later: does the work; None does it before `add` returns.
        spool: where compiled entries wait for the remote; None publishes nothing.
        machine_key: marks what this machine compiled in its disk tier; None leaves the mark out.
    """

    def __init__(
        self,
        tiers: Tiers,
        counters: Counters,
        later: Later | None,
        spool: Spool | None,
        machine_key: bytes | None,
        namespace: Namespace,
    ) -> None:
        self._tiers = tiers
        self._counters = counters
        self._later = later
        self._spool = spool
        self._machine_key = machine_key
        self._namespace = namespace
        self._fresh: PerProcess[dict[Key, Publication]] = PerProcess(dict)  # compiled, and not yet in the tiers

    def find(self, keyed: Keyed) -> Publication | None:
        """What was compiled for exactly this, and is not in the tiers yet."""
        publication = self._fresh.get().get(keyed.key)
        matches = publication is not None and publication.keyed.components == keyed.components
        return publication if matches else None

    def add(self, publication: Publication) -> None:
        """Queues it to be stored here and for the remote; where the queue is full, the caller stores it."""
        if publication.cheap:
            self._counters.not_published("cheap")  # sharing it costs more than compiling it
        self._fresh.get()[publication.keyed.key] = publication
        if self._later is None:
            self._store(publication)
            return
        work, held_bytes = partial(self._store, publication), len(publication.compiled.executable)
        if not self._later.do(work, held_bytes, slowly=publication.cheap):
            self._store(publication, caller_waits=True)

    def forget(self, publication: Publication) -> None:
        """Gives up the place of what is in the tiers by now, or should never be."""
        fresh = self._fresh.get()
        if fresh.get(publication.keyed.key) is publication:
            fresh.pop(publication.keyed.key, None)

    def offer(self, stored: Stored) -> None:
        """Sees to it that the remote gets what this machine compiled before it had this remote."""
        if self._spool is None or self._machine_key is None or stored.attestation is None:
            return
        try:
            entry = stored.entry
            if stored.attestation.made_by_machine(self._machine_key, self._namespace, entry) and self._spool.wants(
                entry
            ):
                add = partial(self._spool.add, entry, durable=False)  # the disk tier still has it
                if self._later is None:
                    add()
                else:
                    self._later.do(add, entry.size_bytes)  # where too much waits, the next hit offers it again
        except Exception:
            _log.exception("an entry could not be offered to the remote")
            self._counters.not_published("internal")

    @property
    def unstored(self) -> int:
        """How many were compiled in this process and are not in the tiers yet."""
        return len(self._fresh.get())

    def _store(self, publication: Publication, *, caller_waits: bool = False) -> None:
        """Packs it, and stores it unless another took its place meanwhile.

        Args:
            caller_waits: too much waits for the thread already, so that this is done while somebody waits for it.
        """
        try:
            if self._fresh.get().get(publication.keyed.key) is publication:
                store_packed = self._store_while_waiting if caller_waits else self._store_packed
                store_packed(publication.entry(), cheap=publication.cheap)
        except (StoreError, InvalidRequest, MemoryError) as error:
            _log.warning("a compiled executable could not be packed: %s", error)
            self._counters.not_published("unpackable")
        except Exception:
            _log.exception("a compiled executable could not be stored")
            self._counters.not_published("internal")
        finally:
            self.forget(publication)

    def _store_while_waiting(self, entry: Entry, *, cheap: bool) -> None:
        """Stores what is worth it on disk, as long as the disk is quick."""
        if cheap:
            self._store_in_memory(entry)
            return
        with self._tiers.waiting_for_disk() as is_quick:
            if is_quick:
                self._store_packed(entry, cheap=cheap)
        if not is_quick:
            self._store_in_memory(entry)
            self._counters.not_published("disk_slow")

    def _store_packed(self, entry: Entry, *, cheap: bool) -> None:
        self._tiers.store_here(entry, self._attestation(entry))
        if not cheap and self._spool is not None:
            self._spool.add(entry, durable=True)

    def _store_in_memory(self, entry: Entry) -> None:
        self._tiers.store_here(entry, self._attestation(entry), to_disk=False)

    def _attestation(self, entry: Entry) -> Attestation | None:
        machine_key = self._machine_key
        return None if machine_key is None else Attestation.by_machine(machine_key, self._namespace, entry)
