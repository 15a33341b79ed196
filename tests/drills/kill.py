"""kill -9 in the midst of everything that writes: nothing wrong is read, nothing acknowledged is lost, nothing stays.

Real processes are killed at random while they work on one kind of thing:

| kind | what the victim does |
|---|---|
| put | two writers at a time put into one disk tier (`DiskStore.put`, attestations, account, this machine's key) |
| evict | the same with room for 10 entries, so that nearly every put evicts, by jobs that start two minutes apart |
| upkeep | `cache gc` and `cache verify --repair` over sound and damaged entries, leftovers, files of others |
| notes | the small files of a machine: its key, aliases of programs, memos of compilers and targets |
| spool | a job spools (`durable=True`) for a real service, and uploads meanwhile |
| index | the service's bucket and SQLite index without HTTP: upkeep, puts, reads, uses, deletes |
| service_put | the service as `serve` runs it, at its start, and while three clients put and delete over HTTP |
| service_evict | the same with a limit of a megabyte, so that nearly every put evicts |

Half of the kills come at a random moment of the time that operations were seen to take. The other half come at a step:
before the n-th call that changes something (open to create, write, fsync, link, rename, unlink, flock, ...) or the n-th
statement of SQLite, for a random n of an operation's, and where that is a write, half of the time in the midst of it.
The figure `kill.kills` tells the spread. Work goes on over what killed processes left, so that damage may add up.

After each few kills a new process looks: every entry that can be read must have its key and the bytes that were put, by
every way to read it; what was reported as done (`put` or `add` returned, the service answered 201 or 204) must be so,
where the limits leave room for it. Then an injected clock moves on as far as the product's own rules ask, and its own
upkeep runs, by command or by nothing but later puts: no temporary file, upload, mark, stale manifest or unnamed blob
may be left, and account, index and folder must agree.

Excluded: loss of power (kill -9 loses no write), and single steps within a statement of SQLite, where only the kills at
random moments come.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from drills._kill_kinds import Kind
from drills._kill_local import Evictions, Notes, Puts, Spooling, Upkeep
from drills._kill_service import IndexUpdates, ServiceEvictions, ServicePuts
from support.clean import clean_folder
from support.figures import Figure, Size
from support.nursery import Nursery

SEED: Final = 20_261_130
_SHARES: Final[dict[type[Kind], int]] = {
    Puts: 24,
    Evictions: 12,
    Upkeep: 8,
    Notes: 8,
    Spooling: 12,
    IndexUpdates: 18,
    ServicePuts: 12,
    ServiceEvictions: 6,
}
"""Of a hundred kills."""


def run(size: Size) -> Iterator[Figure]:
    """A hundred kills, or a thousand."""
    seed = SEED if size is Size.SHORT else SEED + 1
    with clean_folder() as folder, Nursery(folder / "nursery", "drills._kill_jobs") as nursery:
        kinds = [_killed(kind, share * size.of(1, 10), nursery, folder, seed) for kind, share in _SHARES.items()]
    yield from _figures(kinds, size, seed)


def _killed(which: type[Kind], kills: int, nursery: Nursery, root: Path, seed: int) -> Kind:
    """So many kills of one kind, and a look after each few of them."""
    chance = random.Random(f"{seed} {which.name}")
    began = time.monotonic()
    kind = which(nursery, root / which.name, chance)
    try:
        while kind.tally.kills < kills:
            for _ in range(chance.randint(1, 4)):
                kind.kill()
            kind.check()
    finally:
        kind.close()
    print(f"  {which.name}: {kind.tally.kills} kills in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return kind


def _figures(kinds: list[Kind], size: Size, seed: int) -> Iterator[Figure]:
    tallies = {kind.name: kind.tally for kind in kinds}
    kills = sum(tally.kills for tally in tallies.values())
    died_at = sum((tally.died_at for tally in tallies.values()), Counter())
    yield Figure.at_least(
        "kill.kills",
        kills,
        "count",
        size.of(100, 1000),
        seed=seed,
        inside_an_operation=sum(tally.inside for tally in tallies.values()),
        at_a_step=sum(tally.by_step for tally in tallies.values()),
        died_before=dict(died_at.most_common()),
        kinds={name: tally.spread() for name, tally in tallies.items()},
    )
    acknowledged = sum(tally.acknowledged for tally in tallies.values())
    for name, of in (
        ("bad_reads", kills),
        ("acknowledged_lost", acknowledged),
        ("leftovers", kills),
        ("account_off", kills),
    ):
        found = {kind: getattr(tally, name.removeprefix("acknowledged_")) for kind, tally in tallies.items()}
        yield Figure.none_of(
            f"kill.{name}",
            sum(map(len, found.values())),
            of,
            seed=seed,
            kinds={kind: len(faults) for kind, faults in found.items()},
            first=[f"{kind}: {fault}" for kind, faults in found.items() for fault in faults[:5]],
        )
