"""The golden files are read as they were written, and written again byte for byte."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from torchtpu_cache_core.entry import MAGIC, PREFIX, Entry, Frame
from torchtpu_cache_core.key import Component, key_of
from torchtpu_cache_core.manifest import Attestation, Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Key
from torchtpu_cache_core.stores.disk import DiskStore
from torchtpu_cache_core.stores.layout import Layout

_GOLDEN = Path(__file__).parents[2] / "data" / "golden"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", _GOLDEN / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(name: str) -> bytes:
    return (_GOLDEN / name).read_bytes()


def _entry_and_rest(data: bytes) -> tuple[Entry, bytes]:
    end = Frame.parse(data).entry_bytes
    return Entry.parse(data[:end]), data[end:]


@pytest.mark.parametrize("codec", ["zstd", "raw"])
def test_entries_are_read(make: ModuleType, codec: str) -> None:
    entry = Entry.parse(_read(f"entry-v1-{codec}.bin"))
    header = entry.header
    assert bytes(entry.executable()) == (_read("entry-v1-zstd.executable") if codec == "zstd" else bytes(range(256)))
    assert header.codec == codec
    assert header.components == tuple(make.COMPONENTS)
    assert (header.producer, header.road, header.executable_format) == ("golden 1", "topology", "pjrt")
    assert (header.compile_seconds, header.created_seconds) == (12.5, 1_764_500_000.0)


def test_a_raw_entry_is_written_byte_for_byte(make: ModuleType) -> None:
    assert bytes(make.entry(make.INCOMPRESSIBLE).buffer) == _read("entry-v1-raw.bin")


def test_a_packed_entry_is_written_alike(make: ModuleType) -> None:
    """All but the payload, which is the compressor's business, and the lengths and digest that follow from it."""
    written, golden = make.entry(make.COMPRESSIBLE), Entry.parse(_read("entry-v1-zstd.bin"))
    assert written.header == golden.header
    assert written.header.to_bytes() == bytes(golden.buffer[PREFIX.size : golden.frame.payload_offset])
    assert bytes(written.buffer[:16]) == bytes(golden.buffer[:16])
    assert bytes(golden.buffer[:8]) == MAGIC == b"\x89TTCE\r\n\x1a"


@pytest.mark.parametrize("name", ["manifest", "signed", "machine"])
def test_attestation_blocks_are_read_and_written_byte_for_byte(name: str) -> None:
    entry, block = _entry_and_rest(_read(f"entry-v1-{name}.bin"))
    attestation = Attestation.from_block(block)
    assert attestation.to_block() == block
    assert (attestation.machine_mac is not None) == (name == "machine")
    if attestation.manifest is not None:
        attestation.manifest.check(DEFAULT_NAMESPACE, entry.key, entry.digest)


def test_the_signature_verifies_and_is_made_again(make: ModuleType) -> None:
    public = Ed25519PublicKey.from_public_bytes(_read("signing-key.public"))
    signed = Manifest.from_bytes(_read("manifest-v1-signed.json"))
    signed.verify(public)
    assert Manifest.from_header(_read("manifest-v1-signed.header").decode()) == signed
    assert signed.to_header().encode() == _read("manifest-v1-signed.header")
    unsigned = Manifest.from_bytes(_read("manifest-v1.json"))
    assert unsigned.to_bytes() == _read("manifest-v1.json")
    signer = make.Ed25519PrivateKey.from_private_bytes(make.SIGNING_KEY)
    assert unsigned.signed(signer).to_bytes() == _read("manifest-v1-signed.json")


def test_the_machine_mac_is_this_one(make: ModuleType) -> None:
    entry, block = _entry_and_rest(_read("entry-v1-machine.bin"))
    assert Attestation.from_block(block).made_by_machine(make.MACHINE_KEY, DEFAULT_NAMESPACE, entry)


def test_keys_are_these(make: ModuleType) -> None:
    vectors = json.loads(_read("keys-ttc1.json"))
    assert len(vectors) == 26
    for vector in vectors:
        components = [Component.from_json(obj) for obj in vector["components"]]
        assert key_of(components, vector["scheme"]) == Key(vector["key"])
    assert len({vector["key"] for vector in vectors}) == 26


@pytest.mark.parametrize("name", ["zstd", "raw", "manifest", "signed", "machine"])
def test_the_disk_store_serves_them(tmp_path: Path, name: str) -> None:
    data = _read(f"entry-v1-{name}.bin")
    entry, block = _entry_and_rest(data)
    path = Layout(tmp_path / "root", DEFAULT_NAMESPACE).entry(entry.key)
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(data)
    store = DiskStore(tmp_path / "root", DEFAULT_NAMESPACE, limit_bytes=1 << 30, limit_entries=10, min_free_bytes=0)
    stored = store.get(entry.key)
    assert stored is not None
    assert stored.entry.digest == entry.digest
    assert (stored.attestation.to_block() if stored.attestation else b"") == block
