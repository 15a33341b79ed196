"""One kind of kills at a time: how a victim is brought to its end, and what is counted of it."""

from __future__ import annotations

import abc
import itertools
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from support.nursery import CALLS, Nursery, Slot, Victim

_FIRST_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 5.0
_MORE_OPERATIONS: Final = 5


@dataclass
class Tally:
    """What became of one kind. The lists name faults, for people."""

    kills: int = 0
    inside: int = 0
    by_step: int = 0
    acknowledged: int = 0
    checks: int = 0
    died_at: Counter[str] = field(default_factory=Counter)
    steps: set[int] = field(default_factory=set)
    most_steps: int = 0
    usual_steps: int = 1
    bad_reads: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    account_off: list[str] = field(default_factory=list)

    def spread(self) -> dict[str, Any]:
        """How the kills were spread, in plain JSON values."""
        return {
            "kills": self.kills,
            "inside_an_operation": self.inside,
            "at_a_step": self.by_step,
            "at_a_moment": self.kills - self.by_step,
            "steps_hit": f"{len(self.steps)} of {self.most_steps}",
            "usual_steps_hit": f"{sum(step <= self.usual_steps for step in self.steps)} of {self.usual_steps}",
            "acknowledged": self.acknowledged,
            "checks": self.checks,
        }


class Kind(abc.ABC):
    """A kind of kills, in a folder of its own.

    Half of the kills come at a random moment of the operations, as long as they were seen to take; the other half at a
    step that is drawn from as many as operations were seen to have.

    Args:
        chance: decides all that is random here.
    """

    name: ClassVar[str]
    last_operation: ClassVar[int] = 4
    """The latest that a victim may be told to die in."""

    any_step: ClassVar[float] = 0.3
    """How often the step is not one that operations usually have, but any."""

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random) -> None:
        folder.mkdir(mode=0o700)
        self.nursery = nursery
        self.folder = folder
        self.chance = chance
        self.tally = Tally()
        self._seconds = 0.0
        self._started = itertools.count()
        self._steps_to_come: list[int] = []

    @abc.abstractmethod
    def kill(self) -> None:
        """One kill, or two of processes that worked together."""

    @abc.abstractmethod
    def check(self) -> None:
        """Looks at all that the kills since the last check left, and brings it in order as the product does."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends what still runs."""

    def found_leftovers(self, files: Iterable[Path], kept: set[Path], root: Path) -> None:
        """Counts each file that should not be there, once."""
        names = {f"{root.name}/{path.relative_to(root)}" for path in set(files) - kept}
        self.tally.leftovers += sorted(names - set(self.tally.leftovers))

    def start(self, job: str, **arguments: Any) -> Victim:
        """A victim that will die at a step, or else lives until `end`."""
        slots = {}
        if self.tally.most_steps and next(self._started) % 2:
            slots = {
                Slot.DIE_IN: self.chance.randint(1, self.last_operation),
                Slot.DIE_AT: self._step(),
                Slot.TORN: self.chance.randrange(2),
            }
        return self.nursery.start(job, slots, **arguments)

    def _step(self) -> int:
        """Each of the steps that operations usually have in turn; sometimes any that one has had."""
        if self.chance.random() < self.any_step:
            return self.chance.randint(1, self.tally.most_steps)
        if not self._steps_to_come:
            self._steps_to_come = list(range(1, self.tally.usual_steps + 1))
            self.chance.shuffle(self._steps_to_come)
        return self._steps_to_come.pop()

    def end(self, victim: Victim) -> None:
        """Waits for the victim's step, or kills it at a moment; counts either."""
        victim.wait_ready()
        began = time.monotonic()
        if not self.tally.most_steps:  # the first of a kind shows how many steps there are
            while not victim.page[Slot.DONE] and time.monotonic() < began + _PATIENCE_SECONDS:
                time.sleep(0.001)
        if victim.page[Slot.DIE_AT]:
            # One whose operations have fewer steps than others goes on, and is killed at some moment.
            deadline = began + _PATIENCE_SECONDS
            while not victim.wait_dead(0.005) and time.monotonic() < deadline:
                if victim.page[Slot.DONE] >= victim.page[Slot.DIE_IN] + _MORE_OPERATIONS:
                    break
        else:
            time.sleep(self.chance.uniform(0.0, 4 * self._seconds or _FIRST_SECONDS))
        self.finish(victim, began)

    def finish(self, victim: Victim, began: float) -> None:
        """Kills and counts a victim whose operations began then."""
        victim.kill()
        victim.reap()
        page, tally = victim.page, self.tally
        took = time.monotonic() - began
        tally.kills += 1
        tally.inside += page[Slot.BEGUN] > page[Slot.DONE]
        tally.most_steps = max(tally.most_steps, page[Slot.MOST_CALLS])
        if page[Slot.DONE]:
            tally.usual_steps = max(1, page[Slot.ALL_CALLS] // page[Slot.DONE])
        if page[Slot.DIED_AT]:
            tally.by_step += 1
            tally.died_at[CALLS[page[Slot.DIED_AT] - 1]] += 1
            tally.steps.add(page[Slot.CALLS])
        elif page[Slot.DONE]:
            self._seconds = max(self._seconds / 2, took / page[Slot.DONE])
