"""Makes the golden files beside it; README.md says what they are and when to run this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.key import Component, key_of
from torchtpu_cache_core.manifest import Attestation, Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE

HERE: Final = Path(__file__).parent
SIGNING_KEY: Final = bytes(range(32))
MACHINE_KEY: Final = bytes(range(32, 64))
COMPONENTS: Final = [
    Component.of("scheme", "ttc1"),
    Component.of("executable_format", "pjrt"),
    Component.of("program.form", "portable-1.13.0"),
    Component.of("program", b"ML\xefR a golden program"),
    Component.of("options.num_replicas", "1"),
    Component.of("target.platform", "cpu"),
    Component.of("target.platform_version", "golden 1"),
    Component.of("target.compiler", "0" * 64),
    Component.of("environment.XLA_FLAGS", ""),
]
COMPRESSIBLE: Final = b"".join(b"instruction %d; " % i for i in range(2000))
INCOMPRESSIBLE: Final = bytes(range(256))


def entry(executable: bytes) -> Entry:
    return Entry.build(
        executable,
        components=COMPONENTS,
        executable_format="pjrt",
        producer="golden 1",
        road="topology",
        compile_seconds=12.5,
        created_seconds=1_764_500_000.0,
    )


def manifest(stored: Entry) -> Manifest:
    return Manifest(
        namespace=DEFAULT_NAMESPACE,
        key=stored.key,
        generation=1,
        digest=stored.digest,
        size_bytes=stored.size_bytes,
        writer="golden",
        created_seconds=1_764_500_001.5,
    )


def key_vectors() -> list[dict[str, object]]:
    """Component lists and the keys that they hash to: short and long, shown and digested, in every order."""
    lists = [
        [Component.of("a", "b")],
        [Component.of("a", "")],
        [Component.of("", "a")],
        [Component.of("a", "bc"), Component.of("d", "")],
        [Component.of("ab", "c"), Component.of("d", "")],
        [Component.of("d", ""), Component.of("a", "bc")],
        [Component.of("a", "x" * 4096)],
        [Component.of("a", "x" * 4097)],
        [Component.of("a", b"\x00\xff")],
        [Component.digested("a", "0" * 64, 0)],
        [Component.digested("a", "0" * 64, (1 << 63) - 1)],
        [Component.of("a", "0" * 64)],
        COMPONENTS,
    ]
    schemes = ("ttc1", "x")
    return [
        {"scheme": scheme, "components": [c.to_json() for c in components], "key": key_of(components, scheme)}
        for components in lists
        for scheme in schemes
    ]


def main() -> None:
    packed, raw = entry(COMPRESSIBLE), entry(INCOMPRESSIBLE)
    signer = Ed25519PrivateKey.from_private_bytes(SIGNING_KEY)
    signed = manifest(raw).signed(signer)
    public = signer.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    files = {
        "entry-v1-zstd.bin": bytes(packed.buffer),
        "entry-v1-zstd.executable": COMPRESSIBLE,
        "entry-v1-raw.bin": bytes(raw.buffer),
        "entry-v1-manifest.bin": bytes(raw.buffer) + Attestation(manifest(raw)).to_block(),
        "entry-v1-signed.bin": bytes(raw.buffer) + Attestation(signed).to_block(),
        "entry-v1-machine.bin": bytes(raw.buffer)
        + Attestation.by_machine(MACHINE_KEY, DEFAULT_NAMESPACE, raw).to_block(),
        "manifest-v1.json": manifest(raw).to_bytes(),
        "manifest-v1-signed.json": signed.to_bytes(),
        "manifest-v1-signed.header": signed.to_header().encode(),
        "signing-key.public": public,
        "keys-ttc1.json": json.dumps(key_vectors(), indent=1).encode() + b"\n",
    }
    for name, data in files.items():
        (HERE / name).write_bytes(data)
    print(f"{len(files)} files with python-zstandard {zstandard.__version__}")


if __name__ == "__main__":
    main()
