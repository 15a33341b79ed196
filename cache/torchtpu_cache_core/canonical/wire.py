"""The protobuf wire format, read out of hostile bytes: flat, bounded, and without a schema.

Format: https://protobuf.dev/programming-guides/encoding/. A message is a run of fields, each a tag (number and wire
type) and a value. Nothing here recurses: whoever knows that a length-delimited value is a message reads it again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.errors import InvalidRequest

VARINT: Final = 0
FIXED64: Final = 1
LENGTH: Final = 2
FIXED32: Final = 5

MAX_FIELDS: Final = 1 << 16
_MAX_VARINT_BYTES: Final = 10
_MAX_NUMBER: Final = (1 << 29) - 1


class WireError(InvalidRequest):
    """The bytes are no protobuf message."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field as it stands on the wire.

    Args:
        number: 1 to 2**29 - 1.
        wire_type: VARINT, FIXED64, LENGTH or FIXED32.
        value: an unsigned integer below 2**64 for VARINT, the raw bytes for all others.
    """

    number: int
    wire_type: int
    value: int | bytes


def read_varint(data: bytes, offset: int) -> tuple[int, int]:
    """The varint at `offset`, modulo 2**64 as every protobuf reader takes it, and the offset behind it.

    Raises:
        WireError: it does not end within the data or within ten bytes.
    """
    if offset < len(data) and data[offset] < 0x80:  # nearly all are one byte
        return data[offset], offset + 1
    value = 0
    for index, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, offset + index + 1
    raise WireError("a varint does not end")


def read_fields(data: bytes) -> list[Field]:
    """All fields of one message, in the order of the wire.

    Raises:
        WireError: the bytes are no message, use the long-gone groups, or hold more than 65,536 fields.
    """
    fields: list[Field] = []
    offset = 0
    while offset < len(data):
        tag, offset = read_varint(data, offset)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number <= _MAX_NUMBER:
            raise WireError("a field's number is out of range")
        if wire_type == VARINT:
            value, offset = read_varint(data, offset)
            fields.append(Field(number, wire_type, value))
        else:
            if wire_type == LENGTH:
                size, offset = read_varint(data, offset)
            elif wire_type in (FIXED32, FIXED64):
                size = 4 if wire_type == FIXED32 else 8
            else:
                raise WireError("a field has an unknown wire type")
            if size > len(data) - offset:
                raise WireError("a field is longer than the message")
            fields.append(Field(number, wire_type, data[offset : offset + size]))
            offset += size
        if len(fields) > MAX_FIELDS:
            raise WireError("a message has more than 65,536 fields")
    return fields


def varint(value: int) -> bytes:
    """`value`, 0 to 2**64 - 1, in the shortest form."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_field(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value & 0xFFFFFFFFFFFFFFFF)


def length_field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | LENGTH) + varint(len(value)) + value


def signed(value: int, bits: int) -> int:
    """The low `bits` of an unsigned value, as two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def floating(raw: bytes) -> str:
    """An IEEE value of 4 or 8 bytes as text that tells every bit pattern apart."""
    number = struct.unpack("<f" if len(raw) == 4 else "<d", raw)[0]
    return f"nan:{raw.hex()}" if number != number else repr(number)
