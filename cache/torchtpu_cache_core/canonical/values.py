"""Python values as text: equal for equal values in every process, different for values that could act differently.

Nothing depends on set or dict order, on `hash()`, on the locale, or on an object's address.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Mapping
from typing import Final

from torchtpu_cache_core.errors import InvalidRequest

_MAX_DEPTH: Final = 32


def canonical_value(value: object) -> str:
    """`value` as text that tells types apart: `1`, `True`, `1.0` and `"1"` all differ.

    Takes None, booleans, integers, floats (NaN is one value, -0.0 is not 0.0), strings, bytes, enum members, and
    lists, tuples, sets and mappings of these.

    Raises:
        InvalidRequest: anything else, whose text could hold an address, or nesting deeper than 32.
    """
    return _text(value, 0)


def _text(value: object, depth: int) -> str:
    if depth > _MAX_DEPTH:
        raise InvalidRequest("an option is nested deeper than 32 levels")
    # Before their base types: an enum member may be an int or a str as well, and bool is an int.
    if isinstance(value, enum.Enum):
        kind = type(value)
        return f"enum({kind.__module__}.{kind.__qualname__}.{value.name})"
    if value is None or type(value) is bool:
        return str(value).lower()
    if type(value) is int:
        return f"{value:d}"
    if type(value) is float:
        return "float(nan)" if math.isnan(value) else f"float({struct.pack('>d', value).hex()}:{value!r})"
    if type(value) is str:
        return _quoted(value)
    if type(value) is bytes:
        return f"bytes({value.hex()})"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_text(item, depth + 1) for item in value) + "]"
    if isinstance(value, (set, frozenset)):
        return "set(" + ",".join(sorted(_text(item, depth + 1) for item in value)) + ")"
    if isinstance(value, Mapping):
        items = sorted((_text(key, depth + 1), _text(item, depth + 1)) for key, item in value.items())
        return "{" + ",".join(f"{key}:{item}" for key, item in items) + "}"
    raise InvalidRequest(f"an option of type {type(value).__qualname__} cannot be part of a key; pass plain values")


def _quoted(text: str) -> str:
    escaped = "".join(c if 0x20 <= ord(c) < 0x7F and c not in '"\\' else f"\\u{{{ord(c):x}}}" for c in text)
    return f'"{escaped}"'
