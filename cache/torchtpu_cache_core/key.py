"""The key: SHA-256 over the named, length-framed components of a request.

Framing (all integers little-endian, docs/key.md has the table):

    "torchtpu-cache key\\0" | u16 scheme length | scheme | u32 component count | components

    component = u16 name length | name | u8 kind | u64 value length | value

`kind` 0 is a text value (printable ASCII), 1 a digested one (32 raw bytes of SHA-256, then u64 size of what was
digested). The two kinds can never meet, so a text that looks like a digest is no way to forge one. A key is computed
from components in their shown form, so whoever holds an entry's header can compute its key again and compare.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from torchtpu_cache_core.errors import InvalidRequest
from torchtpu_cache_core.names import Key

SCHEME: Final = "ttc1"
"""Changes whenever equal requests could hash otherwise; docs/key.md says what a change means for a fleet."""

MAX_TEXT_BYTES: Final = 16 << 10
"""Longer values are kept as their digest. XLA's whole debug options, the longest text worth comparing, take 10 kB."""

MAX_COMPONENTS: Final = 1024
MAX_NAME_BYTES: Final = 256

_DOMAIN: Final = b"torchtpu-cache key\0"


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a request, as text where it is short and printable, else as its digest.

    Exactly one of `text` and `sha256` is set; `size_bytes` is the length of the value that was given.
    """

    name: str
    text: str | None
    sha256: str | None
    size_bytes: int

    @classmethod
    def of(cls, name: str, value: str | bytes) -> Self:
        """Shows `value` as text if it is at most 16 KiB of printable ASCII, as its digest otherwise."""
        raw = value.encode() if isinstance(value, str) else value
        if len(raw) <= MAX_TEXT_BYTES and _is_shown(raw):
            return cls(name, raw.decode("ascii"), None, len(raw))
        return cls.digested(name, hashlib.sha256(raw).hexdigest(), len(raw))

    @classmethod
    def digested(cls, name: str, sha256: str, size_bytes: int) -> Self:
        """A component whose value is known by its SHA-256 only."""
        return cls(name, None, sha256, size_bytes)

    def to_json(self) -> dict[str, Any]:
        if self.text is not None:
            return {"name": self.name, "text": self.text}
        return {"name": self.name, "sha256": self.sha256, "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, obj: object) -> Self:
        """Reads what `to_json` wrote, out of hostile bytes.

        Raises:
            InvalidRequest: anything but exactly one of the two forms.
        """
        if not isinstance(obj, dict) or not isinstance(name := obj.get("name"), str):
            raise InvalidRequest("a component has no name")
        text, sha256, size = obj.get("text"), obj.get("sha256"), obj.get("size_bytes")
        if not _is_shown(name.encode(errors="surrogatepass")) or len(name) > MAX_NAME_BYTES:
            raise InvalidRequest("a component's name is not short printable ASCII")
        if set(obj) == {"name", "text"} and isinstance(text, str):
            raw = text.encode(errors="surrogatepass")
            if len(raw) <= MAX_TEXT_BYTES and _is_shown(raw):
                return cls(name, text, None, len(raw))
        if (
            set(obj) == {"name", "sha256", "size_bytes"}
            and isinstance(sha256, str)
            and len(sha256) == 64
            and all(c in "0123456789abcdef" for c in sha256)
            and type(size) is int
            and 0 <= size < 1 << 63
        ):
            return cls(name, None, sha256, size)
        raise InvalidRequest(f"component {name[:80]!r} is neither a text nor a digest")

    @property
    def shown(self) -> str:
        """The value as a person reads it."""
        return self.text if self.text is not None else f"sha256:{(self.sha256 or '')[:16]}… ({self.size_bytes:,} bytes)"


def key_of(components: Sequence[Component], scheme: str = SCHEME) -> Key:
    """The key of a request's components, in the order given.

    Raises:
        InvalidRequest: no components, too many, or two under one name.
    """
    names = {c.name for c in components}
    if not components or len(components) > MAX_COMPONENTS or len(names) != len(components):
        raise InvalidRequest("a key needs between 1 and 1,024 components with distinct names")
    framed = [_DOMAIN, _framed("<H", scheme.encode()), struct.pack("<I", len(components))]
    for component in components:
        framed.append(_framed("<H", component.name.encode()))
        if component.text is not None:
            framed.append(b"\0" + _framed("<Q", component.text.encode()))
        else:
            value = bytes.fromhex(component.sha256 or "") + struct.pack("<Q", component.size_bytes)
            framed.append(b"\1" + _framed("<Q", value))
    return Key(f"{scheme}-{hashlib.sha256(b''.join(framed)).hexdigest()}")


def _is_shown(raw: bytes) -> bool:
    # ASCII only: what str.isprintable says of the rest depends on the interpreter's Unicode tables.
    return raw.isascii() and raw.decode("ascii").isprintable()


def _framed(length_format: str, value: bytes) -> bytes:
    try:
        return struct.pack(length_format, len(value)) + value
    except struct.error:
        raise InvalidRequest("a component's name or a scheme is too long") from None


@dataclass(frozen=True, slots=True)
class Difference:
    """A component in which two requests differ; a side that lacks it is None."""

    name: str
    left: Component | None
    right: Component | None


def differences(left: Iterable[Component], right: Iterable[Component]) -> list[Difference]:
    """Where two requests differ, in the order of the left side, then what only the right side has."""
    mine = {c.name: c for c in left}
    theirs = {c.name: c for c in right}
    names = list(mine) + [name for name in theirs if name not in mine]
    return [Difference(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]
