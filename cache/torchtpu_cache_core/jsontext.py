"""JSON as this project writes it, and as it reads it out of hostile bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """Sorted keys, no spaces, ASCII: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def strict_json_object(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in hostile bytes, or None: no duplicate names, no NaN, no numbers of absurd length."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name stands twice")
        return result

    def no_constant(text: str) -> float:
        raise ValueError(f"{text} is no JSON number")

    try:
        value = json.loads(raw, object_pairs_hook=no_duplicates, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
