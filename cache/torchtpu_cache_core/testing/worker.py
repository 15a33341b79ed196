"""A process that puts and gets entries, started by the contract suite: `python -m torchtpu_cache_core.testing.worker`.

It takes one JSON object as argument (`Job`) and prints one: per entry name, the statuses of its puts and the digests
that its gets saw, and the errors that escaped.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from torchtpu_cache_core.errors import StoreError
from torchtpu_cache_core.store import Store
from torchtpu_cache_core.testing.entries import entry_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one worker does.

    Args:
        opener: `module:function`, called with `arguments`, gives the store.
        names: of the entries that it puts and gets.
        variant: makes this worker's entries differ from another's, under the same keys.
        rounds: how often it goes through the names.
    """

    opener: str
    arguments: list[str]
    names: list[str]
    variant: str
    rounds: int = 1

    def start(self) -> subprocess.Popen[str]:
        """A process that sees the modules of this one."""
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "torchtpu_cache_core.testing.worker", json.dumps(asdict(self))]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)

    def run(self) -> dict[str, Any]:
        result: dict[str, Any] = {"puts": {}, "gets": {}, "errors": []}
        with open_store(self.opener, self.arguments) as store:
            for _ in range(self.rounds):
                for name in self.names:
                    self._once(store, name, result)
        return result

    def _once(self, store: Store, name: str, result: dict[str, Any]) -> None:
        entry = entry_for(name, executable=f"{name} of {self.variant} ".encode() * 50)
        try:
            outcome = store.put(entry)
            result["puts"].setdefault(name, []).append([outcome.status, outcome.digest])
            stored = store.get(entry.key)
            result["gets"].setdefault(name, []).append(stored and stored.entry.digest)
        except StoreError as error:
            result["errors"].append(f"{type(error).__name__}: {error}")


def open_store(opener: str, arguments: list[str]) -> Store:
    module, _, function = opener.partition(":")
    store: Store = getattr(importlib.import_module(module), function)(*arguments)
    return store


if __name__ == "__main__":
    print(json.dumps(Job(**json.loads(sys.argv[1])).run()))
