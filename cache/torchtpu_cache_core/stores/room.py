"""Keeps a disk store within its limits: reserves before a write, evicts, and counts anew."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.clock import Clock
from torchtpu_cache_core.errors import CorruptEntry, StoreError, StoreFull
from torchtpu_cache_core.eviction import SPARE_SHARE, choose
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import StoreStats
from torchtpu_cache_core.stores.account import Account
from torchtpu_cache_core.stores.files import Files
from torchtpu_cache_core.stores.layout import SHARDS, Layout, shard_of
from torchtpu_cache_core.stores.ledger import Excess, Ledger, ShardScan
from torchtpu_cache_core.stores.shards import Inventory, Shards

_SLACK: Final = 20  # an eviction frees up to a twentieth of a limit beyond need, so that the next puts need none
_SAMPLE: Final = 64
_MAX_SAMPLE: Final = 512
_MAX_ROUNDS: Final = 4  # with _MAX_SAMPLE, what one put may evict at most
_STATS_SCANS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """What a disk store may take.

    Args:
        limit_bytes: of blocks on the disk: entries, attestation blocks, files being written, leftovers.
        limit_entries: how many entries at most.
        min_free_bytes: what stays free on the file system for others.
    """

    limit_bytes: int
    limit_entries: int
    min_free_bytes: int

    def excess(self, ledger: Ledger) -> Excess:
        return ledger.excess(self.limit_bytes, self.limit_entries)


class Room:
    """The account of a store, and what keeps it within its limits. Thread-safe.

    Args:
        set_aside: moves what is named like an entry, and is none, out of the way.
    """

    def __init__(
        self,
        layout: Layout,
        limits: DiskLimits,
        shards: Shards,
        *,
        clock: Clock,
        files: Files,
        set_aside: Callable[[Key, CorruptEntry], object],
    ) -> None:
        self._layout = layout
        self._limits = limits
        self._shards = shards
        self._clock = clock
        self._files = files
        self._set_aside = set_aside
        self._account = Account(layout.account, files, self._fresh_ledger)

    @property
    def lock_waits_seconds(self) -> list[float]:
        """How long this process waited for the account's lock, the last thousand times."""
        return list(self._account.waits_seconds)

    def stats(self) -> StoreStats:
        """An estimate until every shard was scanned once; scans a few that never were. OSError or StoreError."""
        ledger = self._account.snapshot()
        unseen = [shard for shard in range(SHARDS) if not ledger.scanned_seconds[shard]]
        self._accept(ledger, [self._scanned(shard, ledger.changes[shard]) for shard in unseen[:_STATS_SCANS]])
        return StoreStats(
            entries=ledger.total_entries(),
            size_bytes=ledger.total_bytes(),
            limit_bytes=self._limits.limit_bytes,
            limit_entries=self._limits.limit_entries,
        )

    def reserve(self, shard: int, size_bytes: int) -> None:
        """Counts what is about to be written, and makes room for it. `settle` must follow.

        Raises:
            StoreFull: there is no room, and none could be made; nothing is reserved.
        """
        with self._account.changing() as ledger:
            due = ledger.due(shard, self._clock.time())
            changes = {number: ledger.changes[number] for number in due}
            excess = None if due else self._booked(ledger, shard, size_bytes)
        if excess is None:
            scans = [self._scanned(number, changes[number]) for number in due]
            with self._account.changing() as ledger:
                self._accept(ledger, scans)
                excess = self._booked(ledger, shard, size_bytes)
        try:
            self._keep_limits(self._counted(excess, shard))
            self._keep_free_space(size_bytes)
        except BaseException:
            self.settle(shard, size_bytes, None)
            raise

    def settle(self, shard: int, reserved_bytes: int, occupied_bytes: int | None) -> None:
        """Ends a reservation, with what the new entry counts for, or None if there is none."""

        def change(ledger: Ledger) -> None:
            ledger.release(shard, reserved_bytes)
            if occupied_bytes is not None:
                ledger.add(shard, occupied_bytes)

        self._adjust(change)

    def removed(self, shard: int, occupied_bytes: int) -> None:
        """An entry went, by whatever way."""
        self._adjust(lambda ledger: ledger.remove(shard, occupied_bytes))

    def evict(self, need_bytes: int, need_entries: int, *, spare_bytes: int = 0, spare_entries: int = 0) -> Excess:
        """Removes the least worth of a sample of bounded size; gives what is still over the limits.

        Args:
            spare_bytes, spare_entries: what may go beyond need (`eviction.choose`).
        """
        ledger = self._account.snapshot()
        mean_bytes = max(1, ledger.total_bytes() // max(1, ledger.total_entries()))
        likely = max(need_entries + spare_entries, (need_bytes + spare_bytes) // mean_bytes)
        candidates, corrupt = self._shards.sample(min(_MAX_SAMPLE, max(_SAMPLE, SPARE_SHARE * likely)))
        victims = choose(
            candidates,
            self._clock.time(),
            need_bytes=need_bytes,
            need_entries=need_entries,
            spare_bytes=spare_bytes,
            spare_entries=spare_entries,
        )
        gone: list[tuple[int, int]] = []
        for victim in victims:
            with contextlib.suppress(OSError):  # another process was quicker
                self._files.unlink(self._layout.entry(victim.item))
                gone.append((shard_of(victim.item), victim.size_bytes))
        for key, error in corrupt:
            self._set_aside(key, error)
        with self._account.changing() as shared:
            for shard, size in gone:
                shared.remove(shard, size)
            return self._limits.excess(shared)

    def recount(self, inventories: dict[int, Inventory], before: Ledger) -> int:
        """Takes over a look at many shards and brings the store within its limits; gives how many entries went.

        Args:
            before: `snapshot` as it stood before the look.
        """
        with self._account.changing() as ledger:
            self._accept(ledger, [found.scan(shard, before.changes[shard]) for shard, found in inventories.items()])
            counted = ledger.total_entries()
            excess = self._limits.excess(ledger)
        while excess:
            last, excess = excess, self.evict(excess.size_bytes, excess.entries)
            if excess == last:
                break  # what is left is not ours to remove
        return max(0, counted - self.snapshot().total_entries())

    def snapshot(self) -> Ledger:
        """The ledger as it stands, without a lock."""
        return self._account.snapshot()

    def _counted(self, excess: Excess, shard: int) -> Excess:
        """`excess`, if all that it rests on was counted; else what is found when the rest is scanned.

        Of a lost account most is an estimate, and a writer that was killed leaves its reservation; entries are removed,
        or a put refused, on facts alone. That takes one look at each shard once in the life of an account, and one a
        minute at those where room is reserved.
        """
        ledger = self._account.snapshot() if excess else None
        doubtful = [] if ledger is None else ledger.doubtful(shard, self._clock.time())
        if ledger is None or not doubtful:
            return excess
        scans = [self._scanned(number, ledger.changes[number]) for number in doubtful]
        with self._account.changing() as shared:
            self._accept(shared, scans)
            return self._limits.excess(shared)

    def _booked(self, ledger: Ledger, shard: int, size_bytes: int) -> Excess:
        ledger.reserve(shard, size_bytes)
        return self._limits.excess(ledger)

    def _adjust(self, change: Callable[[Ledger], None]) -> None:
        """Tells the account of something that is done. If that fails, the next scan of the shard finds out."""
        with contextlib.suppress(StoreError), self._account.changing() as ledger:
            change(ledger)

    def _keep_limits(self, excess: Excess) -> None:
        limits = self._limits
        for _ in range(_MAX_ROUNDS):
            if not excess:
                return
            excess = self.evict(
                excess.size_bytes,
                excess.entries,
                spare_bytes=limits.limit_bytes // _SLACK if excess.size_bytes > 0 else 0,
                spare_entries=limits.limit_entries // _SLACK if excess.entries > 0 else 0,
            )
        if excess:
            raise StoreFull(
                f"the disk store is at its limits of {limits.limit_bytes:,} bytes and {limits.limit_entries:,} "
                "entries, and could not make room"
            )

    def _keep_free_space(self, size_bytes: int) -> None:
        missing = self._missing_bytes(size_bytes)
        # Where others fill the disk, dropping all that we have would help nobody.
        if 0 < missing <= self.snapshot().total_bytes() - size_bytes:
            self.evict(missing, 0)
            missing = self._missing_bytes(size_bytes)
        if missing > 0:
            raise StoreFull(f"the disk is almost full: {self._limits.min_free_bytes:,} bytes are to stay free on it")

    def _missing_bytes(self, size_bytes: int) -> int:
        space = self._files.statvfs(self._layout.root)
        return size_bytes + self._limits.min_free_bytes - space.f_bavail * space.f_frsize

    def _fresh_ledger(self) -> Ledger:
        """Of a store whose account is new or lost: what has no folder is known to be empty."""
        ledger, now = Ledger(), self._clock.time()
        present = set(self._shards.present())
        ledger.scanned_seconds = [0.0 if shard in present else now for shard in range(SHARDS)]
        return ledger

    def _scanned(self, shard: int, change: int) -> ShardScan | int:
        """What a scan found, or the bare shard where its folder cannot be listed."""
        try:
            return self._shards.inventory(shard).scan(shard, change)
        except OSError:
            return shard

    def _accept(self, ledger: Ledger, scans: Iterable[ShardScan | int]) -> None:
        now = self._clock.time()
        for scan in scans:
            if isinstance(scan, ShardScan):
                ledger.accept(scan, now)
            else:
                ledger.postpone(scan, now)  # one folder that cannot be listed stops no put into another
