"""A node is put together from what can be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from torchtpu_cache.assembly import assemble
from torchtpu_cache_core.config import Config, load
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason
from torchtpu_cache_core.manifest import Attestation
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for

_ENTRY = entry_for("the entry")


def _config(folder: Path) -> Config:
    folder.mkdir(mode=0o700)
    return load({"dir": str(folder), "min_free_bytes": "0"}, {}).config


def test_the_disk_tier_works_without_a_machine_s_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = _config(tmp_path / "cache")
    (config.dir / "machine.key").mkdir()
    with caplog.at_level(logging.WARNING):
        made = assemble(config)
    try:
        assert made.disk is not None
        made.disk.put(_ENTRY)
        assert made.disk.get(_ENTRY.key) is not None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    finally:
        made.close()


def test_the_disk_tier_holds_marks_against_the_machine_s_key(tmp_path: Path) -> None:
    config = _config(tmp_path / "cache")
    made = assemble(config)
    try:
        assert made.disk is not None
        made.disk.put(_ENTRY, Attestation.by_machine(bytes(32), DEFAULT_NAMESPACE, _ENTRY))
        with pytest.raises(CorruptEntry) as caught:
            made.disk.get(_ENTRY.key)
        assert caught.value.reason is CorruptReason.SIGNATURE
    finally:
        made.close()
