"""Fuzzes manifests and attestation blocks: they are read, or refused with CorruptEntry."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import sys

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core.errors import CorruptEntry
    from torchtpu_cache_core.manifest import BLOCK_MAGIC, BLOCK_PREFIX, BLOCK_VERSION, Attestation, Manifest


def one_input(data: bytes) -> None:
    with contextlib.suppress(CorruptEntry):
        manifest = Manifest.from_bytes(data)
        assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    with contextlib.suppress(CorruptEntry):
        Manifest.from_header(data.decode("latin-1"))
    with contextlib.suppress(CorruptEntry):
        Manifest.from_header(base64.b64encode(data).decode())
    with contextlib.suppress(CorruptEntry):
        Attestation.from_block(data)
    block = BLOCK_PREFIX.pack(BLOCK_MAGIC, BLOCK_VERSION, 0, len(data)) + data
    with contextlib.suppress(CorruptEntry):
        attestation = Attestation.from_block(block + hashlib.sha256(block).digest())
        assert Attestation.from_block(attestation.to_block()) == attestation


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
