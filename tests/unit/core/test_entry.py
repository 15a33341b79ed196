"""The entry's bytes: what is built comes back, what is damaged is told, and nothing else happens."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtpu_cache_core.entry import MAX_EXPANSION, MAX_HEADER_BYTES, PREFIX, Entry, Frame, Verifier
from torchtpu_cache_core.errors import CorruptEntry, CorruptReason, EntryTooLarge, InvalidRequest
from torchtpu_cache_core.header import CODEC_RAW, CODEC_ZSTD, Header
from torchtpu_cache_core.jsontext import strict_json_object
from torchtpu_cache_core.key import Component
from torchtpu_cache_core.stores.immutable import immutable
from torchtpu_cache_core.testing.entries import (
    Corruption,
    components_for,
    corruptions,
    entry_for,
    header_fields,
    payload_of,
    rival_of,
    sealed,
    too_large_prefix,
)
from torchtpu_cache_core.testing.unpickling import no_unpickling

_ENTRY = entry_for("entry")
_BYTES = bytes(_ENTRY.buffer)
_CORRUPTIONS = list(corruptions(_ENTRY))


def _outcome(chunks: list[bytes], limit_bytes: int = 1 << 30) -> object:
    """What a verifier says of bytes that arrive in these pieces."""
    verifier = Verifier(limit_bytes)
    try:
        for chunk in chunks:
            verifier.feed(chunk)
        return verifier.finish()
    except CorruptEntry as error:
        return error.reason
    except EntryTooLarge as error:
        return error.size_bytes


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.binary(max_size=5000), st.floats(0, 1e6), st.floats(0, 1e11))
def test_what_is_built_comes_back(executable: bytes, compile_seconds: float, created_seconds: float) -> None:
    entry = Entry.build(
        executable,
        components=components_for("x"),
        executable_format="pjrt",
        producer="p",
        road="client",
        compile_seconds=compile_seconds,
        created_seconds=created_seconds,
    )
    again = Entry.parse(bytes(entry.buffer))
    assert (again.header, again.digest, again.size_bytes) == (entry.header, entry.digest, len(entry.buffer))
    assert bytes(again.executable()) == executable
    again.check(entry.key, entry.header.components)


@pytest.mark.parametrize("corruption", _CORRUPTIONS, ids=lambda c: c.name)
def test_every_corruption_is_told(corruption: Corruption) -> None:
    with no_unpickling(), pytest.raises(CorruptEntry) as caught:
        entry = Entry.parse(corruption.data)
        entry.check(_ENTRY.key)
        entry.executable()
    assert caught.value.reason is corruption.reason


def test_every_reason_of_an_entry_has_a_corruption() -> None:
    elsewhere = {CorruptReason.TARGET, CorruptReason.MANIFEST, CorruptReason.SIGNATURE}  # need a request or a manifest
    assert {c.reason for c in _CORRUPTIONS} == set(CorruptReason) - elsewhere


@given(st.sampled_from([_BYTES, *(c.data for c in _CORRUPTIONS)]), st.lists(st.integers(0, 1 << 20), max_size=12))
def test_pieces_say_the_same_as_the_whole(data: bytes, cuts: list[int]) -> None:
    assert _outcome(_split(data, cuts)) == _outcome([data])


@given(st.integers(0, len(_BYTES) - 1), st.integers(1, 255))
def test_any_changed_byte_is_told(at: int, flip: int) -> None:
    damaged = bytearray(_BYTES)
    damaged[at] ^= flip
    assert isinstance(_outcome([bytes(damaged)]), CorruptReason | int)


@given(st.integers(0, len(_BYTES) - 1), st.binary(min_size=1, max_size=40))
def test_any_cut_or_longer_file_is_told(length: int, more: bytes) -> None:
    assert _outcome([_BYTES[:length]]) is CorruptReason.SHORT
    assert _outcome([_BYTES + more]) is CorruptReason.LENGTH
    assert _outcome([_BYTES, more]) is CorruptReason.LENGTH


@settings(max_examples=300)
@given(st.binary(max_size=400))
@example(b"")
def test_arbitrary_bytes_are_an_answer(data: bytes) -> None:
    assert isinstance(_outcome([data]), CorruptReason | int)
    # The same, past the magic: as a payload, as a header, behind a right prefix.
    assert isinstance(_outcome([sealed(data, b"payload")]), CorruptReason)
    assert isinstance(_outcome([PREFIX.pack(*PREFIX.unpack(_BYTES[:24])) + data]), CorruptReason)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(header_fields(_ENTRY))), _JSON)
def test_any_value_in_any_header_field_is_an_answer(name: str, value: object) -> None:
    header = json.dumps({**header_fields(_ENTRY), name: value}).encode()
    try:
        parsed = Header.from_bytes(header)
    except CorruptEntry:
        return
    assert Header.from_bytes(parsed.to_bytes()) == parsed


@settings(max_examples=200)
@given(st.binary(max_size=300), st.sampled_from([CODEC_ZSTD, CODEC_RAW]), st.integers(0, 1 << 32))
def test_any_payload_unpacks_as_declared_or_not_at_all(payload: bytes, codec: str, declared: int) -> None:
    fields = {**header_fields(_ENTRY), "codec": codec, "executable_bytes": declared}
    entry = Entry.parse(sealed(fields, payload))
    try:
        assert len(entry.executable()) == declared
    except CorruptEntry as error:
        assert error.reason in (CorruptReason.PAYLOAD, CorruptReason.LENGTH)


@given(st.binary(max_size=200))
def test_strict_json_never_raises(raw: bytes) -> None:
    value = strict_json_object(raw)
    assert value is None or isinstance(value, dict)


# ---- limits ----------------------------------------------------------------------------------------------------


def test_a_limit_is_told_from_a_corruption() -> None:
    with pytest.raises(EntryTooLarge) as caught:
        Entry.parse(_BYTES, max_entry_bytes=len(_BYTES) - 1)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (len(_BYTES), len(_BYTES) - 1)
    assert Entry.parse(_BYTES, max_entry_bytes=len(_BYTES)).digest == _ENTRY.digest
    Frame.parse(too_large_prefix())


def test_a_verifier_keeps_no_more_than_the_header() -> None:
    verifier = Verifier()
    prefix = PREFIX.pack(*PREFIX.unpack(_BYTES[:24])[:4], 1 << 30)
    verifier.feed(prefix + _BYTES[24 : _ENTRY.frame.payload_offset])
    piece = bytes(1 << 20)
    tracemalloc.start()
    try:
        for _ in range(200):
            verifier.feed(piece)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 16


_BOMBS = """
import resource, sys
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.errors import CorruptEntry
from torchtpu_cache_core.testing.entries import corruptions, entry_for
bombs = list(corruptions(entry_for("bomb")))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for bomb in bombs:
    try:
        Entry.parse(bomb.data).executable()
    except CorruptEntry:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_bombs_take_no_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _BOMBS], capture_output=True, text=True, timeout=60, check=True)
    grown_kib = int(done.stdout)
    assert grown_kib < 8 << 10, f"{grown_kib} KiB; the bombs hold 16 MiB and more"


def test_writers_store_raw_what_would_look_like_a_bomb() -> None:
    entry = entry_for("zeros", executable=bytes(8 << 20))
    assert entry.header.codec == CODEC_RAW
    once = entry_for("once", executable=bytes(MAX_EXPANSION * 20))
    assert bytes(Entry.parse(bytes(once.buffer)).executable()) == bytes(MAX_EXPANSION * 20)


def test_components_too_large_for_a_header_are_refused() -> None:
    components = [Component.of(f"c{i}", "x" * 4096) for i in range(MAX_HEADER_BYTES // 4096)]
    with pytest.raises(InvalidRequest, match="too large"):
        Entry.build(
            b"x",
            components=components,
            executable_format="pjrt",
            producer="p",
            road="client",
            compile_seconds=1.0,
            created_seconds=1.0,
        )


# ---- questions and buffers -------------------------------------------------------------------------------------


def test_check_compares_key_and_components() -> None:
    _ENTRY.check(_ENTRY.key, components_for("entry"))
    with pytest.raises(CorruptEntry) as caught:
        _ENTRY.check(entry_for("other").key)
    assert caught.value.reason is CorruptReason.KEY
    with pytest.raises(CorruptEntry) as caught:
        _ENTRY.check(_ENTRY.key, components_for("entry", target_platform="tpu"))
    assert caught.value.reason is CorruptReason.TARGET


def test_an_entry_is_independent_of_the_buffer_it_was_built_from() -> None:
    source = bytearray(b"executable " * 100)
    entry = Entry.build(
        memoryview(source),
        components=components_for("x"),
        executable_format="pjrt",
        producer="p",
        road="client",
        compile_seconds=1.0,
        created_seconds=1.0,
    )
    source[:] = bytes(len(source))
    assert bytes(entry.executable()) == b"executable " * 100
    assert entry.buffer.readonly


def test_rivals_share_a_key_and_nothing_else() -> None:
    rival = rival_of(_ENTRY)
    assert rival.key == _ENTRY.key
    assert rival.digest != _ENTRY.digest
    assert payload_of(rival) != payload_of(_ENTRY)


def test_a_buffer_that_others_hold_is_copied_and_one_of_its_own_is_not() -> None:
    made = entry_for("program")
    shared = Entry.parse(bytearray(made.buffer))
    assert immutable(made) is made
    copied = immutable(shared)
    assert copied is not shared
    assert type(copied.buffer.obj) is bytes
    owned = dataclasses.replace(shared, owned=True)
    assert immutable(owned) is owned
