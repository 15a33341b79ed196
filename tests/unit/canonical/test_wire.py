"""The wire format: what was written is read, and no bytes do harm."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.canonical.wire import (
    FIXED64,
    LENGTH,
    MAX_FIELDS,
    VARINT,
    Field,
    WireError,
    floating,
    length_field,
    read_fields,
    read_varint,
    signed,
    varint,
    varint_field,
)

NUMBERS = st.integers(1, (1 << 29) - 1)


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=4))
def test_varint_round_trip(value: int, behind: bytes) -> None:
    raw = varint(value)
    assert read_varint(raw + behind, 0) == (value, len(raw))


@given(st.lists(st.one_of(st.tuples(NUMBERS, st.integers(0, (1 << 64) - 1)), st.tuples(NUMBERS, st.binary()))))
def test_fields_round_trip(pairs: list[tuple[int, int | bytes]]) -> None:
    raw = b"".join(varint_field(n, v) if isinstance(v, int) else length_field(n, v) for n, v in pairs)
    assert read_fields(raw) == [Field(n, VARINT if isinstance(v, int) else LENGTH, v) for n, v in pairs]


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_fields_or_refused(raw: bytes) -> None:
    try:
        fields = read_fields(raw)
    except WireError:
        return
    assert sum(len(f.value) if isinstance(f.value, bytes) else 1 for f in fields) <= len(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01",  # field number 0
        b"\x0b\x0c",  # a group
        b"\x0a\x05abc",  # longer than the message
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length of 2**64 - 1
        b"\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",  # eleven bytes of varint
        b"\x09\x00",  # a cut fixed64
        b"\x80",
    ],
)
def test_refuses(raw: bytes) -> None:
    with pytest.raises(WireError):
        read_fields(raw)


def test_refuses_too_many_fields() -> None:
    with pytest.raises(WireError, match="65,536"):
        read_fields(b"\x08\x01" * (MAX_FIELDS + 1))


def test_fixed_values_stay_bytes() -> None:
    assert read_fields(b"\x09" + b"12345678") == [Field(1, FIXED64, b"12345678")]


@given(st.integers(-(1 << 31), (1 << 31) - 1))
def test_signed(value: int) -> None:
    assert signed(value & 0xFFFFFFFFFFFFFFFF, 64) == value
    assert signed(value & 0xFFFFFFFF, 32) == value


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8))
def test_floats_differ_where_their_bits_do(left: bytes, right: bytes) -> None:
    assert (floating(left) == floating(right)) == (left == right)


def test_float_text() -> None:
    assert floating(struct.pack("<d", -0.0)) == "-0.0"
    assert floating(struct.pack("<f", math.nan)).startswith("nan:")
