"""Where the disk store keeps what: the one place that turns names into paths.

    <root>/machine.key                                    this machine's own key (0600)
    <root>/accounts/<namespace>                           how much there is (`ledger`)
    <root>/entries/<namespace>/<2 hex>/<key>              one file per entry: entry bytes, then its attestation block
    <root>/entries/<namespace>/<2 hex>/.tmp-<pid>-<hex>   being written
    <root>/quarantine/<namespace>/<what was set aside>

The two hex digits are the first of the key's digest: the **shard**. Everything else in these folders is foreign.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from torchtpu_cache_core.errors import InvalidName
from torchtpu_cache_core.names import Key, Namespace

SHARDS: Final = 256
_TEMP: Final = re.compile(r"\.tmp-[0-9]{1,10}-[0-9a-f]{16}")


@dataclass(frozen=True)
class Layout:
    """The paths of one namespace under one root."""

    root: Path
    namespace: Namespace

    @cached_property
    def entries(self) -> Path:
        return self.root / "entries" / self.namespace

    @cached_property
    def account(self) -> Path:
        return self.root / "accounts" / self.namespace

    @cached_property
    def quarantine(self) -> Path:
        return self.root / "quarantine" / self.namespace

    def shard_dir(self, shard: int) -> Path:
        return self.entries / f"{shard:02x}"

    def entry(self, key: Key) -> Path:
        return self.shard_dir(shard_of(key)) / key


def shard_of(key: Key) -> int:
    return int(key.hexdigest[:2], 16)


def shard_named(name: str) -> int | None:
    """The shard whose folder has this name."""
    return int(name, 16) if re.fullmatch(r"[0-9a-f]{2}", name) else None


def temp_name() -> str:
    """A name that no other writer has. The pid is for people: who lives is told by a lock on the file, because a pid
    may be used again, and means nothing to another container or host."""
    return f".tmp-{os.getpid()}-{secrets.token_hex(8)}"


def is_temp(name: str) -> bool:
    return _TEMP.fullmatch(name) is not None


def key_named(name: str, shard: int) -> Key | None:
    """The key whose file in this shard's folder has this name; None for everything that is not ours."""
    try:
        key = Key(name)
    except InvalidName:
        return None
    return key if shard_of(key) == shard else None
