"""The header of an entry: what it says of itself, as JSON. docs/entry.md says what each field means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, InvalidName, InvalidRequest
from torchtpu_cache_core.jsontext import canonical_json, strict_json_object
from torchtpu_cache_core.key import MAX_COMPONENTS, Component, key_of
from torchtpu_cache_core.names import Key

MAX_EXECUTABLE_BYTES: Final = 4 << 30

CODEC_ZSTD: Final = "zstd"
CODEC_RAW: Final = "raw"

_HEADER_FIELDS: Final = {
    "key": str,
    "components": list,
    "executable_format": str,
    "codec": str,
    "executable_bytes": int,
    "producer": str,
    "road": str,
    "compile_seconds": float,
    "created_seconds": float,
}
_MAX_TEXT_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What an entry says of itself.

    Args:
        key: what the components hash to.
        components: of the request, in the key's order.
        executable_format: one of the formats of request.py, also a component.
        codec: how the payload is coded: `zstd` or `raw`.
        executable_bytes: length of the executable once unpacked.
        producer: the program and version that compiled it, for people.
        road: how it was compiled: `topology` (ahead of time) or `client` (in a live job).
        compile_seconds: what the compile cost, the worth of the entry.
        created_seconds: when, since the Unix epoch, by the producer's clock.
    """

    key: Key
    components: tuple[Component, ...]
    executable_format: str
    codec: str
    executable_bytes: int
    producer: str
    road: str
    compile_seconds: float
    created_seconds: float

    def to_bytes(self) -> bytes:
        fields = {name: getattr(self, name) for name in _HEADER_FIELDS}
        fields["components"] = [c.to_json() for c in self.components]
        return canonical_json(fields)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Reads a header out of hostile bytes.

        Raises:
            CorruptEntry: it is not what `to_bytes` writes, or its components do not hash to its key.
        """
        fields = strict_json_object(raw)
        if fields is None or set(fields) != set(_HEADER_FIELDS):
            raise CorruptEntry(CorruptReason.HEADER, "not the JSON object that it should be")
        for name, kind in _HEADER_FIELDS.items():
            value = fields[name]
            if type(value) is not kind:
                raise CorruptEntry(CorruptReason.HEADER, f"{name} has the wrong type")
            if (
                isinstance(value, str)
                and name != "key"
                and not (value.isprintable() and len(value) <= _MAX_TEXT_CHARACTERS)
            ):
                raise CorruptEntry(CorruptReason.HEADER, f"{name} is too long or not printable")
        if not 0 <= fields["executable_bytes"] <= MAX_EXECUTABLE_BYTES:
            raise CorruptEntry(CorruptReason.LENGTH, "executable_bytes is over the hard cap")
        if not (0 <= fields["compile_seconds"] < 1e9 and 0 <= fields["created_seconds"] < 1e12):
            raise CorruptEntry(CorruptReason.HEADER, "a time makes no sense")
        if fields["codec"] not in (CODEC_ZSTD, CODEC_RAW):
            raise CorruptEntry(CorruptReason.CODEC, "a codec that we do not know")
        if len(fields["components"]) > MAX_COMPONENTS:
            raise CorruptEntry(CorruptReason.HEADER, "too many components")
        try:
            components = tuple(Component.from_json(obj) for obj in fields["components"])
            key = Key(fields["key"])
            hashed = key_of(components, key.scheme)
        except (InvalidName, InvalidRequest) as error:
            raise CorruptEntry(CorruptReason.HEADER, str(error)) from None
        if hashed != key:
            raise CorruptEntry(CorruptReason.KEY, "the components do not hash to the key")
        return cls(**{**fields, "key": key, "components": components})
