"""The key: framing that cannot be confused, and components out of hostile JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtpu_cache_core.errors import InvalidRequest
from torchtpu_cache_core.key import MAX_COMPONENTS, MAX_TEXT_BYTES, Component, differences, key_of

_PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
_COMPONENT = st.builds(Component.of, _PRINTABLE, _PRINTABLE | st.binary(max_size=40))
_COMPONENTS = st.lists(_COMPONENT, min_size=1, max_size=6, unique_by=lambda c: c.name)


@given(_COMPONENTS, _COMPONENTS)
def test_keys_are_equal_only_for_equal_components(left: list[Component], right: list[Component]) -> None:
    assert (key_of(left) == key_of(right)) == (left == right)


@given(_COMPONENTS)
def test_components_come_back_from_json_with_their_key(components: list[Component]) -> None:
    again = [Component.from_json(json.loads(json.dumps(c.to_json()))) for c in components]
    assert key_of(again) == key_of(components)
    for mine, theirs in zip(components, again, strict=True):
        assert (mine.text, mine.sha256, mine.size_bytes) == (theirs.text, theirs.sha256, theirs.size_bytes)


def test_the_border_between_two_values_counts() -> None:
    pairs = [
        [("a", "bc"), ("d", "")],
        [("a", "b"), ("d", "c")],
        [("ab", "c"), ("d", "")],
        [("d", ""), ("a", "bc")],
        [("a", "bc")],
    ]
    keys = {key_of([Component.of(name, value) for name, value in pair]) for pair in pairs}
    assert len(keys) == len(pairs)


def test_a_text_that_looks_like_a_digest_is_none() -> None:
    digested = Component.of("program", bytes(5000))
    assert digested.sha256 is not None
    forged = Component.of("program", digested.sha256)
    assert forged.text == digested.sha256
    assert key_of([forged]) != key_of([digested])


def test_the_size_of_a_digested_value_counts() -> None:
    assert key_of([Component.digested("p", "0" * 64, 1)]) != key_of([Component.digested("p", "0" * 64, 2)])


def test_the_scheme_counts() -> None:
    components = [Component.of("a", "b")]
    assert key_of(components, "ttc1").hexdigest != key_of(components, "ttc2").hexdigest


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"", True),
        (b"x" * MAX_TEXT_BYTES, True),
        (b"x" * (MAX_TEXT_BYTES + 1), False),
        (b"tab\t", False),
        (b"\x7f", False),
        ("é", False),
        (b"\xff", False),
    ],
)
def test_short_printable_values_are_shown(value: bytes | str, shown: bool) -> None:
    component = Component.of("c", value)
    assert (component.text is not None) == shown
    assert (component.sha256 is None) == shown


@pytest.mark.parametrize("components", [[], [Component.of("a", "1")] * 2])
def test_no_or_repeated_components_make_no_key(components: list[Component]) -> None:
    with pytest.raises(InvalidRequest):
        key_of(components)


def test_too_many_components_make_no_key() -> None:
    components = [Component.of(str(i), "") for i in range(MAX_COMPONENTS + 1)]
    with pytest.raises(InvalidRequest):
        key_of(components)
    key_of(components[:-1])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["name", "text", "sha256", "size_bytes", "x"]), _JSON, max_size=4) | _JSON)
def test_hostile_json_is_a_component_or_refused(obj: object) -> None:
    try:
        component = Component.from_json(obj)
    except InvalidRequest:
        return
    assert Component.from_json(component.to_json()) == component
    key_of([component])


def test_differences_name_what_differs_in_order() -> None:
    left = [Component.of(name, name) for name in "abc"]
    right = [Component.of("a", "a"), Component.of("c", "other"), Component.of("d", "d")]
    found = differences(left, right)
    assert [d.name for d in found] == ["b", "c", "d"]
    assert [(d.left is None, d.right is None) for d in found] == [(False, True), (False, False), (True, False)]
    assert differences(left, left) == []
