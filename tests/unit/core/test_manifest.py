"""Manifests, attestations and their block, out of good and hostile bytes."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtpu_cache_core.errors import CorruptEntry, CorruptReason
from torchtpu_cache_core.manifest import BLOCK_MAGIC, BLOCK_PREFIX, Attestation, Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Namespace
from torchtpu_cache_core.testing.entries import entry_for, rival_of

_ENTRY = entry_for("attested")
_SIGNER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
_MACHINE_KEY = bytes(range(32, 64))
_MANIFEST = Manifest(
    namespace=DEFAULT_NAMESPACE,
    key=_ENTRY.key,
    generation=3,
    digest=_ENTRY.digest,
    size_bytes=_ENTRY.size_bytes,
    writer="local",
    created_seconds=1_764_500_000.25,
)
_ATTESTATIONS = [
    Attestation(),
    Attestation(_MANIFEST),
    Attestation(_MANIFEST.signed(_SIGNER)),
    Attestation.by_machine(_MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY),
]


def _block(body: object, **changed: Any) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"magic": BLOCK_MAGIC, "version": 1, "zero": 0, "length": len(raw), **changed}
    block = BLOCK_PREFIX.pack(*fields.values()) + raw
    return block + hashlib.sha256(block).digest()


@pytest.mark.parametrize("manifest", [_MANIFEST, _MANIFEST.signed(_SIGNER)], ids=["unsigned", "signed"])
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert Manifest.from_header(manifest.to_header()) == manifest


@pytest.mark.parametrize("attestation", _ATTESTATIONS)
def test_a_block_comes_back(attestation: Attestation) -> None:
    assert Attestation.from_block(attestation.to_block()) == attestation
    assert Attestation.from_block(memoryview(attestation.to_block())) == attestation


def test_a_signature_covers_every_field() -> None:
    signed = _MANIFEST.signed(_SIGNER)
    signed.verify(_SIGNER.public_key())
    other: dict[str, Any] = {
        "namespace": Namespace("other"),
        "key": entry_for("other").key,
        "generation": 4,
        "digest": Digest("0" * 64),
        "size_bytes": 1,
        "writer": "mallory",
        "created_seconds": 1.0,
    }
    for name, value in other.items():
        with pytest.raises(CorruptEntry) as caught:
            replace(signed, **{name: value}).verify(_SIGNER.public_key())
        assert caught.value.reason is CorruptReason.SIGNATURE


@pytest.mark.parametrize("signature", ["", "AAAA", "not base64!", base64.b64encode(bytes(64)).decode(), "é"])
def test_what_is_no_signature_does_not_verify(signature: str) -> None:
    with pytest.raises(CorruptEntry) as caught:
        replace(_MANIFEST, signature=signature).verify(_SIGNER.public_key())
    assert caught.value.reason is CorruptReason.SIGNATURE


def test_another_key_does_not_verify() -> None:
    with pytest.raises(CorruptEntry):
        _MANIFEST.signed(_SIGNER).verify(Ed25519PrivateKey.generate().public_key())


def test_a_manifest_speaks_of_one_entry() -> None:
    _MANIFEST.check(DEFAULT_NAMESPACE, _ENTRY.key, _ENTRY.digest)
    for wrong in (
        (Namespace("other"), _ENTRY.key, _ENTRY.digest),
        (DEFAULT_NAMESPACE, entry_for("other").key, _ENTRY.digest),
        (DEFAULT_NAMESPACE, _ENTRY.key, rival_of(_ENTRY).digest),
    ):
        with pytest.raises(CorruptEntry):
            _MANIFEST.check(*wrong)


def test_a_machine_mac_is_of_one_machine_namespace_and_entry() -> None:
    mark = _ATTESTATIONS[3]
    assert mark.made_by_machine(_MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY)
    assert not mark.made_by_machine(bytes(32), DEFAULT_NAMESPACE, _ENTRY)
    assert not mark.made_by_machine(_MACHINE_KEY, Namespace("other"), _ENTRY)
    assert not mark.made_by_machine(_MACHINE_KEY, DEFAULT_NAMESPACE, rival_of(_ENTRY))
    assert not Attestation().made_by_machine(_MACHINE_KEY, DEFAULT_NAMESPACE, _ENTRY)


_GOOD = _MANIFEST.to_json()
_BENT: dict[str, object] = {
    "missing field": {k: v for k, v in _GOOD.items() if k != "writer"},
    "unknown field": {**_GOOD, "x": 1},
    "other version": {**_GOOD, "version": 2},
    "generation 0": {**_GOOD, "generation": 0},
    "generation over 2^53": {**_GOOD, "generation": 1 << 53},
    "bool generation": {**_GOOD, "generation": True},
    "float size": {**_GOOD, "size_bytes": 1.0},
    "size 0": {**_GOOD, "size_bytes": 0},
    "int time": {**_GOOD, "created_seconds": 1},
    "infinite time": {**_GOOD, "created_seconds": 1e400},
    "path-like namespace": {**_GOOD, "namespace": "../x"},
    "path-like key": {**_GOOD, "key": "../" + _ENTRY.key},
    "short digest": {**_GOOD, "digest": "ab"},
    "newline in writer": {**_GOOD, "writer": "a\nb"},
    "endless writer": {**_GOOD, "writer": "a" * 300},
    "endless signature": {**_GOOD, "signature": "a" * 200},
    "list": [],
    "null": None,
}


@pytest.mark.parametrize("name", _BENT)
def test_bent_manifests_are_refused(name: str) -> None:
    raw = json.dumps(_BENT[name]).encode()
    with pytest.raises(CorruptEntry) as caught:
        Manifest.from_bytes(raw)
    assert caught.value.reason is CorruptReason.MANIFEST
    with pytest.raises(CorruptEntry):
        Attestation.from_block(_block({"manifest": _BENT[name]}))


@pytest.mark.parametrize(
    "block",
    [
        b"",
        bytes(48),
        _block({}, magic=b"\x89TTCE\r\n\x1a"),
        _block({}, version=2),
        _block({}, zero=1),
        _block({}, length=1 << 31),
        _block({}, length=0),
        _block(b"[]"),
        _block({"extra": 1}),
        _block({"machine_mac": "zz" * 32}),
        _block({"machine_mac": "ab"}),
        _block({"machine_mac": 7}),
        _block(b'{"machine_mac":null,"machine_mac":null}'),
        _block(b"[" * 60_000),
        Attestation().to_block()[:-1],
        Attestation().to_block() + b"\0",
    ],
    ids=range(16),
)
def test_bent_blocks_are_refused(block: bytes) -> None:
    with pytest.raises(CorruptEntry) as caught:
        Attestation.from_block(block)
    assert caught.value.reason is CorruptReason.MANIFEST


@given(st.sampled_from(_ATTESTATIONS), st.integers(0, 1 << 16), st.integers(1, 255))
def test_any_changed_byte_of_a_block_is_told(attestation: Attestation, at: int, flip: int) -> None:
    block = bytearray(attestation.to_block())
    block[at % len(block)] ^= flip
    with pytest.raises(CorruptEntry):
        Attestation.from_block(bytes(block))


@settings(max_examples=200)
@given(st.binary(max_size=300), st.text(max_size=100))
def test_arbitrary_bytes_are_refused_and_nothing_else(data: bytes, text: str) -> None:
    for read in (
        lambda: Manifest.from_bytes(data),
        lambda: Manifest.from_header(text),
        lambda: Manifest.from_header(base64.b64encode(data).decode()),
        lambda: Attestation.from_block(data),
        lambda: Attestation.from_block(_block(data)),
    ):
        with pytest.raises(CorruptEntry):
            read()
