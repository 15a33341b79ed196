"""Components of compile options: what must not, and what must, make another key."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.canonical.options import (
    BUILD_OPTIONS,
    COMPILE_OPTIONS,
    DROP,
    MAX_OPTIONS_BYTES,
    NORMALISE,
    device_count,
    encode_options,
    options_components,
)
from torchtpu_cache_core.canonical.wire import length_field, varint, varint_field
from torchtpu_cache_core.errors import InvalidRequest

DUMP_TO, MAX_ISA, FAST_MATH, DUMP_MAX, ESTIMATOR, TARGET_CONFIG, DISABLE_PASSES = 109, 333, 99, 132, 357, 261, 30
GEMM_TILING, EXTRA_OPTIONS = 474, 500


def shown(options: bytes, *, position_independent: bool = False) -> dict[str, str]:
    components = options_components(options, position_independent=position_independent, noted={})
    return {c.name.removeprefix("options."): c.shown for c in components}


def build(*fields: bytes) -> bytes:
    return length_field(3, b"".join(fields))


def debug(*fields: bytes) -> bytes:
    return build(length_field(3, b"".join(fields)))


def entry(key: str, value: str) -> bytes:
    return length_field(1, key.encode()) + length_field(2, value.encode())


def override(key: str, value: bytes) -> bytes:
    return length_field(7, length_field(1, key.encode()) + length_field(2, value))


def assignment(*rows: list[int]) -> bytes:
    devices = [length_field(3, length_field(1, b"".join(varint(d) for d in row))) for row in rows]
    return length_field(9, varint_field(1, len(rows[0])) + varint_field(2, len(rows)) + b"".join(devices))


def test_readable_names_and_values() -> None:
    assert shown(encode_options(num_replicas=2, num_partitions=4, use_spmd_partitioning=True)) == {
        "table": "1",
        "build_options": "present",
        "device_ordinal": "-1",
        "num_replicas": "2",
        "num_partitions": "4",
        "use_spmd_partitioning": "true",
    }


def test_device_count() -> None:
    assert device_count(encode_options(num_replicas=2, num_partitions=4, use_spmd_partitioning=True)) == 8
    assert device_count(b"") == device_count(b"\xff") == device_count(build(varint_field(4, -3))) == 1


def test_fields_in_another_order_are_equal() -> None:
    fields = [varint_field(4, 2), varint_field(5, 3), varint_field(19, 1), length_field(3, varint_field(99, 1))]
    top = [varint_field(2, 1), varint_field(5, 7), length_field(6, b"slices")]
    expected = shown(build(*fields) + b"".join(top))
    for seed in range(20):
        rng = random.Random(seed)
        parts = [build(*rng.sample(fields, 4)), *top]
        assert shown(b"".join(rng.sample(parts, len(parts)))) == expected


def test_messages_that_stand_twice_are_merged() -> None:
    assert shown(build(varint_field(4, 2)) + build(varint_field(5, 3))) == shown(
        build(varint_field(4, 2), varint_field(5, 3))
    )


def test_the_last_number_counts() -> None:
    assert shown(build(varint_field(5, 2), varint_field(5, 3))) == shown(build(varint_field(5, 3)))
    assert shown(build(varint_field(5, 2), varint_field(5, 3))) != shown(build(varint_field(5, 3), varint_field(5, 2)))


def test_packed_and_unpacked_lists_and_long_numbers_are_equal() -> None:
    packed = build(length_field(16, varint(2) + varint(300)))
    unpacked = build(varint_field(16, 2), varint_field(16, 300))
    long = build(varint_field(16, 2), varint(16 << 3) + b"\xac\x82\x00")
    assert shown(packed) == shown(unpacked) == shown(long)
    assert shown(packed) != shown(build(length_field(16, varint(300) + varint(2))))


def test_map_entries_are_sorted() -> None:
    one, two = length_field(ESTIMATOR, entry("a", "1")), length_field(ESTIMATOR, entry("b", "2"))
    assert shown(debug(one, two)) == shown(debug(two, one))
    assert shown(debug(one, two)) != shown(debug(one))
    assert shown(override("xla_b", varint_field(2, 1)) + override("xla_a", length_field(1, b"x"))) == shown(
        override("xla_a", length_field(1, b"x")) + override("xla_b", varint_field(2, 1))
    )


def test_map_entries_of_one_key_keep_their_order() -> None:
    one, two = length_field(ESTIMATOR, entry("a", "1")), length_field(ESTIMATOR, entry("a", "2"))
    assert len({shown(debug(*pair))["debug_options"] for pair in ((one, two), (two, one), (one, one), (two,))}) == 4


def test_only_maps_of_flags_leave_flags_out() -> None:
    dumps = [entry("xla_dump_to", "/tmp/x"), entry("v", "1")]
    for number, kept in ((ESTIMATOR, True), (GEMM_TILING, True), (EXTRA_OPTIONS, False)):
        for dump in dumps:
            assert (shown(debug(length_field(number, dump))) != shown(debug())) is kept


def test_lists_keep_their_order() -> None:
    one, two = length_field(DISABLE_PASSES, b"cse"), length_field(DISABLE_PASSES, b"dce")
    assert shown(debug(one, two)) != shown(debug(two, one))
    joined = length_field(DISABLE_PASSES, b"cse,dce")
    assert shown(debug(one, two)) != shown(debug(joined))


def test_overrides_tell_types_apart() -> None:
    values = [
        length_field(1, b"1"),
        varint_field(2, 1),
        varint_field(3, 1),
        varint(4 << 3 | 1) + b"\0" * 6 + b"\xf0\x3f",
    ]
    assert shown(override("xla_f", values[3]))["env_option_overrides"] == "{xla_f=double:1.0}"
    assert len({shown(override("xla_f", value))["env_option_overrides"] for value in values}) == 4


@pytest.mark.parametrize(
    "options",
    [
        debug(length_field(DUMP_TO, b"/tmp/dump-17")),
        debug(varint_field(DUMP_MAX, 3)),
        debug(length_field(407, b"/tmp/autotune")),
        debug(length_field(310, b"/var/cache")),
    ],
)
def test_where_to_write_is_left_out(options: bytes) -> None:
    assert shown(options) == shown(debug())


def test_dump_overrides_are_left_out() -> None:
    kept = override("xla_tpu_scoped_vmem_limit_kib", varint_field(3, 4096))
    assert shown(kept + override("xla_dump_to", length_field(1, b"/tmp/x"))) == shown(kept)
    assert shown(override("xla_dump_to", length_field(1, b"/tmp/x"))) == shown(b"")
    assert shown(kept) != shown(override("xla_tpu_scoped_vmem_limit_kib", varint_field(3, 8192)))


def test_in_place_permission_is_left_out() -> None:
    assert shown(varint_field(9, 1)) == shown(b"")


@pytest.mark.parametrize("number", [n for n, row in COMPILE_OPTIONS.items() if row[2] != DROP and n not in (3, 7)])
def test_every_kept_field_counts(number: int) -> None:
    texts = {
        str(shown(raw)) for raw in (b"", varint_field(number, 1), varint_field(number, 2), length_field(number, b"\1"))
    }
    assert len(texts) >= 3


@pytest.mark.parametrize("number", [n for n in BUILD_OPTIONS if n != 3])
def test_every_kept_build_field_counts(number: int) -> None:
    texts = {str(shown(build(*raw))) for raw in ([], [varint_field(number, 1)], [length_field(number, b"\0")])}
    assert len(texts) == 3


def test_unknown_fields_count() -> None:
    for wrap in (bytes, build, debug):
        texts = {
            str(shown(wrap(raw))) for raw in (b"", varint_field(999, 1), varint_field(999, 2), length_field(999, b"\1"))
        }
        assert len(texts) == 4
        assert str(shown(wrap(varint_field(999, 1) + varint_field(999, 2)))) not in texts


def test_a_known_field_of_another_wire_type_counts() -> None:
    assert shown(build(length_field(5, b"4"))) != shown(build(varint_field(5, 4)))
    assert shown(varint_field(3, 5)) != shown(b"")
    assert shown(length_field(9, b"x")) != shown(b"")


def test_explicit_default_is_a_safe_miss() -> None:
    assert shown(debug(varint_field(FAST_MATH, 0))) != shown(debug())


def test_position_is_normalised_only_where_proved() -> None:
    here, there = assignment([0], [1]), assignment([7], [4])
    assert shown(build(here)) != shown(build(there))
    assert shown(build(here), position_independent=True) == shown(build(there), position_independent=True)
    assert shown(build(here), position_independent=True) != shown(build(assignment([0, 1])), position_independent=True)
    for number in (1, 22):
        assert BUILD_OPTIONS[number][2] == NORMALISE
        one, two = build(varint_field(number, 1)), build(varint_field(number, 2))
        assert shown(one) != shown(two)
        assert shown(one, position_independent=True) == shown(two, position_independent=True)


@pytest.mark.parametrize(
    "odd",
    [
        assignment([3, 3]),
        length_field(9, varint_field(1, 2) + varint_field(2, 1) + length_field(3, length_field(1, varint(5)))),
        length_field(9, varint_field(1, 1) + varint_field(2, 1)),
        length_field(
            9, varint_field(1, 1) + varint_field(2, 1) + length_field(3, varint_field(1, 5)) + varint_field(8, 1)
        ),
        length_field(
            9, varint_field(1, 1) + varint_field(2, 1) + length_field(3, varint_field(1, 5) + varint_field(2, 5))
        ),
    ],
)
def test_an_odd_device_assignment_stays_as_it_is(odd: bytes) -> None:
    plain = shown(build(assignment([0, 1])), position_independent=True)["device_assignment"]
    assert plain == "replicas=2;computations=1;devices=logical"
    assert "logical" not in shown(build(odd), position_independent=True)["device_assignment"]


def test_file_options_are_kept_by_content(tmp_path: Path) -> None:
    def with_file(name: str, content: str, number: int) -> dict[str, str]:
        path = tmp_path / name
        path.write_text(content)
        return shown(debug(length_field(number, str(path).encode())))

    assert with_file("a", "v5e", TARGET_CONFIG) == with_file("b", "v5e", TARGET_CONFIG)
    assert with_file("a", "v5e", TARGET_CONFIG) != with_file("a", "v6e", TARGET_CONFIG)
    assert with_file("a", "v5e", MAX_ISA) != with_file("a", "v6e", MAX_ISA)
    assert with_file("a", "v5e", MAX_ISA) != with_file("b", "v5e", MAX_ISA)


def test_what_is_no_message_is_hashed_raw() -> None:
    assert set(shown(b"\xff\xff")) == {"table", "raw"}
    assert shown(b"\xff\xff") != shown(b"\xff\xfe")
    assert set(shown(length_field(3, b"\xff"))) == {"table", "raw"}


def test_options_over_the_limit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="over"):
        options_components(bytes(MAX_OPTIONS_BYTES + 1), position_independent=False, noted={})


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_give_components(raw: bytes, independent: bool) -> None:
    components = options_components(raw, position_independent=independent, noted={})
    assert len({c.name for c in components}) == len(components)
    assert components == options_components(raw, position_independent=independent, noted={})
    assert device_count(raw) >= 1


TREE = st.lists(st.tuples(st.integers(1, 600), st.one_of(st.integers(0, 1 << 40), st.binary(max_size=12))), max_size=12)


@given(TREE)
def test_arbitrary_debug_options_give_components(fields: list[tuple[int, int | bytes]]) -> None:
    raw = debug(*(varint_field(n, v) if isinstance(v, int) else length_field(n, v) for n, v in fields))
    assert shown(raw) == shown(raw)
