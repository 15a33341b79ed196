"""Fuzzes what lies in a cache folder: entry files, the account, notes are read, refused as documented, or replaced."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core.errors import CorruptEntry, StoreError
    from torchtpu_cache_core.manifest import Attestation
    from torchtpu_cache_core.names import DEFAULT_NAMESPACE
    from torchtpu_cache_core.notes import read_note
    from torchtpu_cache_core.store import PutStatus
    from torchtpu_cache_core.stores.disk import DiskStore
    from torchtpu_cache_core.stores.layout import Layout
    from torchtpu_cache_core.stores.ledger import Ledger
    from torchtpu_cache_core.testing.entries import entry_for

_ENTRY = entry_for("fuzz", size_bytes=100)
_KEY = bytes(32)
_BLOCK = Attestation.by_machine(_KEY, DEFAULT_NAMESPACE, _ENTRY).to_block()


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    kind, at = provider.ConsumeIntInRange(0, 3), provider.ConsumeIntInRange(0, 2000)
    rest = provider.ConsumeBytes(1 << 16)
    whole = bytes(_ENTRY.buffer) + _BLOCK
    raw = (rest, whole[:at] + rest, bytes(_ENTRY.buffer) + rest, whole[:at] + rest + whole[at + len(rest) :])[kind]
    store = DiskStore(
        _ROOT, DEFAULT_NAMESPACE, limit_bytes=1 << 24, limit_entries=100, min_free_bytes=0, machine_key=_KEY
    )
    path = Layout(_ROOT, DEFAULT_NAMESPACE).entry(_ENTRY.key)
    path.write_bytes(raw)
    with contextlib.suppress(CorruptEntry):
        found = store.get(_ENTRY.key)
        assert found is not None
        assert found.entry.key == _ENTRY.key
    if at % 8 == 0:  # they cost more than all the rest
        with contextlib.suppress(StoreError):
            list(store.iterate())
        assert store.put(_ENTRY).status in PutStatus
    path.unlink(missing_ok=True)
    ledger = Ledger.from_bytes(raw)
    assert ledger is None or Ledger.from_bytes(ledger.to_bytes()) is not None
    note = _ROOT / "note"
    note.write_bytes(rest + b"\n" + hashlib.sha256(rest).hexdigest().encode() if at % 2 else rest)
    read_note(note, 1 << 16)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        _ROOT = Path(folder)
        _ROOT.chmod(0o700)
        DiskStore(_ROOT, DEFAULT_NAMESPACE, limit_bytes=1 << 24, limit_entries=100, min_free_bytes=0).put(_ENTRY)
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
