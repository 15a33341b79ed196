"""The manifest: the small signed record that binds namespace, key and generation to an entry's digest.

On the wire it is the base64 of its JSON in a header (`wire.MANIFEST_HEADER`); in a bucket it is the JSON itself; in
a disk file it travels in a **block** behind the entry:

| offset | bytes | what (integers little-endian) |
|---|---|---|
| 0 | 8 | magic `89 54 54 43 4d 0d 0a 1a` |
| 8 | 2 | block version, now 1 |
| 10 | 2 | zero |
| 12 | 4 | length L of the JSON, at most 64 KiB |
| 16 | L | JSON object with `manifest` or `machine_mac` |
| 16 + L | 32 | SHA-256 of all bytes of the block before |

An entry that this machine compiled itself carries a MAC under the machine's own key instead of a manifest: it stands
in for a signature on this machine only. Services do not sign yet; the format and its golden files are settled.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from torchtpu_cache_core.entry import MAX_ENTRY_BYTES
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, InvalidName
from torchtpu_cache_core.jsontext import canonical_json, strict_json_object
from torchtpu_cache_core.names import Digest, Key, Namespace

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

    from torchtpu_cache_core.entry import Entry

MANIFEST_VERSION: Final = 1
BLOCK_MAGIC: Final = b"\x89TTCM\r\n\x1a"
BLOCK_VERSION: Final = 1
BLOCK_PREFIX: Final = struct.Struct("<8sHHI")
MAX_BLOCK_JSON_BYTES: Final = 64 << 10
MAX_MANIFEST_BYTES: Final = 4096

_SIGNED_DOMAIN: Final = b"torchtpu-cache manifest\0"
_MAC_DOMAIN: Final = b"torchtpu-cache machine mac\0"
_FIELDS: Final = {
    "version": int,
    "namespace": str,
    "key": str,
    "generation": int,
    "digest": str,
    "size_bytes": int,
    "writer": str,
    "created_seconds": float,
    "signature": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Binds (namespace, key, generation) to an entry's digest.

    Args:
        generation: from 1; the next after a generation that was closed for good.
        writer: who published it, as the service knows them (`local` without authentication).
        created_seconds: by the service's clock.
        signature: base64 of an Ed25519 signature over the other fields, or empty where nobody signs.
    """

    namespace: Namespace
    key: Key
    generation: int
    digest: Digest
    size_bytes: int
    writer: str
    created_seconds: float
    signature: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"version": MANIFEST_VERSION} | {name: getattr(self, name) for name in _FIELDS if name != "version"}

    def to_bytes(self) -> bytes:
        return canonical_json(self.to_json())

    def to_header(self) -> str:
        """What stands in the HTTP header."""
        return base64.b64encode(self.to_bytes()).decode()

    @classmethod
    def from_json(cls, fields: object) -> Self:
        """Reads a manifest out of hostile JSON.

        Raises:
            CorruptEntry: it is not one.
        """
        if not isinstance(fields, dict) or set(fields) != set(_FIELDS):
            raise CorruptEntry(CorruptReason.MANIFEST, "other fields than a manifest has")
        for name, kind in _FIELDS.items():
            if type(fields[name]) is not kind:
                raise CorruptEntry(CorruptReason.MANIFEST, f"{name} has the wrong type")
        if fields["version"] != MANIFEST_VERSION:
            raise CorruptEntry(CorruptReason.MANIFEST, "a version that we cannot read")
        if not (1 <= fields["generation"] < 1 << 53 and 0 < fields["size_bytes"] <= MAX_ENTRY_BYTES):
            raise CorruptEntry(CorruptReason.MANIFEST, "a number makes no sense")
        if not (fields["writer"].isprintable() and len(fields["writer"]) <= 256):
            raise CorruptEntry(CorruptReason.MANIFEST, "a writer that is no name")
        if not 0 <= fields["created_seconds"] < 1e12 or len(fields["signature"]) > 128:
            raise CorruptEntry(CorruptReason.MANIFEST, "a time or signature makes no sense")
        try:
            names = {
                "namespace": Namespace(fields["namespace"]),
                "key": Key(fields["key"]),
                "digest": Digest(fields["digest"]),
            }
        except InvalidName as error:
            raise CorruptEntry(CorruptReason.MANIFEST, str(error)) from None
        return cls(**{name: fields[name] for name in _FIELDS if name != "version"} | names)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads `to_bytes` back; CorruptEntry as in `from_json`."""
        if len(raw) > MAX_MANIFEST_BYTES:
            raise CorruptEntry(CorruptReason.MANIFEST, "too long")
        return cls.from_json(strict_json_object(raw))

    @classmethod
    def from_header(cls, value: str) -> Self:
        """Reads `to_header` back; CorruptEntry as in `from_json`."""
        try:
            raw = base64.b64decode(value, validate=True)
        except ValueError:
            raise CorruptEntry(CorruptReason.MANIFEST, "not base64") from None
        return cls.from_bytes(raw)

    def check(self, namespace: Namespace, key: Key, digest: Digest) -> None:
        """Refuses a manifest that speaks of something else; CorruptEntry."""
        if (self.namespace, self.key, self.digest) != (namespace, key, digest):
            raise CorruptEntry(CorruptReason.MANIFEST, "the manifest speaks of another entry")

    def _signed_bytes(self) -> bytes:
        return _SIGNED_DOMAIN + replace(self, signature="").to_bytes()

    def signed(self, private_key: Ed25519PrivateKey) -> Self:
        """This manifest with its signature."""
        return replace(self, signature=base64.b64encode(private_key.sign(self._signed_bytes())).decode())

    def verify(self, public_key: Ed25519PublicKey) -> None:
        """Refuses a manifest that the holder of the key did not sign; CorruptEntry."""
        from cryptography.exceptions import InvalidSignature

        try:
            public_key.verify(base64.b64decode(self.signature, validate=True), self._signed_bytes())
        except (InvalidSignature, ValueError):
            raise CorruptEntry(CorruptReason.SIGNATURE, "the manifest's signature does not verify") from None


@dataclass(frozen=True, slots=True)
class Attestation:
    """Why a reader on this machine may trust an entry's bytes: a manifest, or this machine's own MAC."""

    manifest: Manifest | None = None
    machine_mac: bytes | None = None

    @classmethod
    def by_machine(cls, machine_key: bytes, namespace: Namespace, entry: Entry) -> Self:
        """The mark of an entry that this machine compiled itself."""
        return cls(machine_mac=_mac(machine_key, namespace, entry))

    def made_by_machine(self, machine_key: bytes, namespace: Namespace, entry: Entry) -> bool:
        """Whether `by_machine` was called with this machine's key for this very entry."""
        return self.machine_mac is not None and hmac.compare_digest(
            self.machine_mac, _mac(machine_key, namespace, entry)
        )

    def check_mark(self, machine_key: bytes, namespace: Namespace, entry: Entry) -> None:
        """Refuses a machine's mark that was made for something else, or with another key; CorruptEntry."""
        if self.machine_mac is not None and not self.made_by_machine(machine_key, namespace, entry):
            raise CorruptEntry(CorruptReason.SIGNATURE, "the mark behind the entry is not this machine's mark of it")

    def to_block(self) -> bytes:
        """The block that stands behind the entry in a disk file."""
        body: dict[str, Any] = {}
        if self.manifest is not None:
            body["manifest"] = self.manifest.to_json()
        if self.machine_mac is not None:
            body["machine_mac"] = self.machine_mac.hex()
        raw = canonical_json(body)
        block = BLOCK_PREFIX.pack(BLOCK_MAGIC, BLOCK_VERSION, 0, len(raw)) + raw
        return block + hashlib.sha256(block).digest()

    @classmethod
    def from_block(cls, raw: bytes | memoryview) -> Self:
        """Reads a whole block out of hostile bytes.

        Raises:
            CorruptEntry: it is not one, to the last byte.
        """
        if len(raw) < BLOCK_PREFIX.size + 32:
            raise CorruptEntry(CorruptReason.MANIFEST, "the block behind the entry is cut short")
        magic, version, zero, length = BLOCK_PREFIX.unpack_from(raw)
        if magic != BLOCK_MAGIC or version != BLOCK_VERSION or zero or length > MAX_BLOCK_JSON_BYTES:
            raise CorruptEntry(CorruptReason.MANIFEST, "what stands behind the entry is no block of ours")
        end = BLOCK_PREFIX.size + length
        if len(raw) != end + 32 or hashlib.sha256(raw[:end]).digest() != raw[end:]:
            raise CorruptEntry(CorruptReason.MANIFEST, "the block's length or digest is wrong")
        body = strict_json_object(bytes(raw[BLOCK_PREFIX.size : end]))
        if body is None or not set(body) <= {"manifest", "machine_mac"}:
            raise CorruptEntry(CorruptReason.MANIFEST, "the block holds no attestation")
        mac = body.get("machine_mac")
        if mac is not None and not (isinstance(mac, str) and len(mac) == 64):
            raise CorruptEntry(CorruptReason.MANIFEST, "the machine MAC has the wrong form")
        try:
            machine_mac = None if mac is None else bytes.fromhex(mac)
        except ValueError:
            raise CorruptEntry(CorruptReason.MANIFEST, "the machine MAC has the wrong form") from None
        return cls(Manifest.from_json(body["manifest"]) if "manifest" in body else None, machine_mac)


def _mac(machine_key: bytes, namespace: Namespace, entry: Entry) -> bytes:
    framed = b"\0".join((namespace.encode(), entry.key.encode(), entry.digest.encode()))
    return hmac.new(machine_key, _MAC_DOMAIN + framed, hashlib.sha256).digest()
