"""Random histories of a store, compared with a dict after every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.names import Key
from torchtpu_cache_core.store import PutStatus, Store
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import entry_for, key_for, rival_of

_NAMES: Final = ("a", "b", "c")
_ENTRIES: Final = {name: (first := entry_for(name, size_bytes=300), rival_of(first)) for name in _NAMES}
_KEYS: Final = {name: key_for(name) for name in _NAMES}

OpenFresh = Callable[[], tuple[Path, ManualClock, Callable[[], Store]]]
Corrupt = Callable[[Path, Key], bool]


def run_model(open_fresh: OpenFresh, corrupt: Corrupt | None, *, examples: int) -> None:
    """Tries random histories.

    Args:
        open_fresh: a fresh place, its clock, and what opens a store on it (again).
        corrupt: damages the stored bytes of a key that has an entry; False where it cannot.
        examples: how many histories.
    """

    class Model(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.clock, self.open = open_fresh()
            self.store = self.open()
            self.model: dict[str, Entry] = {}
            self.damaged: set[str] = set()

        @rule(name=st.sampled_from(_NAMES), variant=st.integers(0, 1))
        def put(self, name: str, variant: int) -> None:
            entry = _ENTRIES[name][variant]
            outcome = self.store.put(entry)
            there = None if name in self.damaged else self.model.get(name)
            if there is None:
                assert outcome.status is PutStatus.CREATED
                there = self.model[name] = entry
                self.damaged.discard(name)
            elif there is entry:
                assert outcome.status is PutStatus.SAME
            else:
                assert outcome.status is PutStatus.CONFLICT
            assert outcome.digest == there.digest

        @rule(name=st.sampled_from(_NAMES))
        def get(self, name: str) -> None:
            if name in self.damaged:
                with pytest.raises(CorruptEntry):
                    self.store.get(_KEYS[name])
                self.damaged.discard(name)
                del self.model[name]
            stored = self.store.get(_KEYS[name])
            expected = self.model.get(name)
            assert (None if stored is None else stored.entry.digest) == (expected and expected.digest)

        @rule(name=st.sampled_from(_NAMES))
        def contains(self, name: str) -> None:
            if name not in self.damaged:
                assert self.store.contains(_KEYS[name]) == (name in self.model)

        @precondition(lambda self: self.store.capabilities.deletes)
        @rule(name=st.sampled_from(_NAMES))
        def delete(self, name: str) -> None:
            assert self.store.delete(_KEYS[name]) == (name in self.model)
            self.model.pop(name, None)
            self.damaged.discard(name)

        @precondition(lambda self: self.store.capabilities.iterates)
        @rule()
        def iterate(self) -> None:
            listed = {info.key for info in self.store.iterate()}
            whole = {_KEYS[name] for name in self.model if name not in self.damaged}
            assert whole <= listed <= {_KEYS[name] for name in self.model}

        @rule(seconds=st.sampled_from([0.5, 61.0, 86_400.0]))
        def wait(self, seconds: float) -> None:
            self.clock.advance(seconds)

        @precondition(lambda self: self.store.capabilities.durable)
        @rule()
        def reopen(self) -> None:
            self.store.close()
            self.store = self.open()

        @precondition(lambda self: corrupt is not None and bool(set(self.model) - self.damaged))
        @rule(data=st.data())
        def damage(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(set(self.model) - self.damaged)))
            if corrupt is not None and corrupt(self.place, _KEYS[name]):
                self.damaged.add(name)

        @rule()
        def stats(self) -> None:
            # What is damaged may or may not still count.
            assert len(self.model) - len(self.damaged) <= self.store.stats().entries <= len(self.model)

        def teardown(self) -> None:
            self.store.close()

    run_state_machine_as_test(
        Model,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,  # shared machines stall
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
