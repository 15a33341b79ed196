"""Python values in a key: equal values are equal text, different ones are not."""

from __future__ import annotations

import enum
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.canonical.values import canonical_value
from torchtpu_cache_core.errors import InvalidRequest


class Level(enum.Enum):
    FAST = 1


class Number(enum.IntEnum):
    ONE = 1


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.frozensets(SCALARS)),
    max_leaves=12,
)


def typed(value: object) -> object:
    """`value` in a form in which Python's own equality tells types and signed zeros apart."""
    if isinstance(value, dict):
        return ("dict", frozenset((typed(k), typed(v)) for k, v in value.items()))
    if isinstance(value, list):
        return ("list", tuple(typed(v) for v in value))
    if isinstance(value, frozenset):
        return ("set", frozenset(typed(v) for v in value))
    return (type(value).__name__, value, math.copysign(1, value) if isinstance(value, float) else 0)


@given(VALUES, VALUES)
def test_texts_are_equal_just_where_values_are(left: object, right: object) -> None:
    assert (canonical_value(left) == canonical_value(right)) == (typed(left) == typed(right))


def test_look_alikes_differ() -> None:
    texts = [
        canonical_value(v) for v in (1, True, 1.0, "1", b"1", Number.ONE, Level.FAST, [1], {1}, {1: 1}, None, "None")
    ]
    assert len(set(texts)) == len(texts)


def test_nan_is_one_value_and_zeros_are_two() -> None:
    assert canonical_value(math.nan) == canonical_value(-math.nan) == canonical_value(float("nan"))
    assert canonical_value(0.0) != canonical_value(-0.0)


def test_order_of_sets_and_mappings_has_no_meaning() -> None:
    assert canonical_value({"b": {3, 1, 2}, "a": 0}) == canonical_value({"a": 0, "b": {2, 3, 1}})
    assert canonical_value({frozenset({"x", "y"}): 1}) == canonical_value({frozenset({"y", "x"}): 1})
    assert canonical_value([1, 2]) != canonical_value([2, 1])


def test_an_object_with_an_address_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="object"):
        canonical_value({"f": [object()]})


def test_endless_nesting_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(InvalidRequest, match="deeper"):
        canonical_value(value)
