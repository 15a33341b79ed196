"""Programs that nobody can parse: hashed as they stand, or bypassed."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtpu_cache_core.canonical.scan import BYTECODE_MAGIC, scan, text_count
from torchtpu_cache_core.errors import Bypass


def reason(program: bytes) -> str:
    try:
        return scan(program).form
    except Bypass as bypass:
        return bypass.reason


def prefix_varint(value: int) -> bytes:
    return bytes([value << 1 | 1]) if value < 128 else (value << 2 | 2).to_bytes(2, "little")


def bytecode(*strings: bytes, sections: bytes = b"", version: int = 6) -> bytes:
    """MLIR bytecode with just a string section, lengths last string first."""
    lengths = b"".join(prefix_varint(len(text) + 1) for text in reversed(strings))
    section = prefix_varint(len(strings)) + lengths + b"".join(text + b"\0" for text in strings)
    head = BYTECODE_MAGIC + prefix_varint(version) + b"StableHLO_v1.99.0\0"
    return head + b"\0" + prefix_varint(len(section)) + section + sections


def test_the_corpus_can_be_scanned(modules: list[Path]) -> None:
    for path in modules:
        raw = path.read_bytes()
        identity = scan(raw)
        assert (identity.form, identity.sha256, identity.size_bytes) == (
            "raw",
            hashlib.sha256(raw).hexdigest(),
            len(raw),
        )


@pytest.mark.parametrize(
    "name",
    [b"custom_call_v1", b"custom_call_v2", b"send_v1", b"recv", b"xla_ffi_python_cpu_callback", b"is_host_transfer"],
)
def test_traces_in_bytecode_bypass(name: bytes) -> None:
    assert reason(bytecode(b"add_v1", b"vhlo")) == "raw"
    assert reason(bytecode(b"add_v1", name)) == "unparsed_custom_call"


def test_names_that_only_look_alike_pass() -> None:
    assert reason(bytecode(b"ascend_v1", b"recvd", b"resend")) == "raw"


TEXT = b"""module @m {
  func.func public @main(%a: tensor<2xf32>) -> tensor<2xf32> {
    return %a : tensor<2xf32>
  }
}
"""


@pytest.mark.parametrize(
    "line",
    [
        b"%0 = stablehlo.custom_call @foo(%a) : (tensor<2xf32>) -> tensor<2xf32>",
        b'%0 = "stablehlo.custom_call"(%a) {call_target_name = "foo"} : () -> ()',
        b'%0 = "stablehlo.c\\75stom_call"(%a) : () -> ()',
        b'%0 = "stablehlo.send"(%a, %t) : () -> ()',
        b"%0 = stablehlo.recv %t : () -> ()",
    ],
)
def test_traces_in_text_bypass(line: bytes) -> None:
    assert reason(TEXT) == reason(b"// a comment\n" + TEXT) == "raw"
    assert reason(TEXT.replace(b"    return", b"    " + line + b"\n    return")) == "unparsed_custom_call"


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b"\0",
        b"HloModule m",
        b"garbage",
        TEXT + b"\0",
        TEXT + b"\xff",
        BYTECODE_MAGIC,
        bytecode(b"a", version=7),
        bytecode(b"a") + b"\0",
        bytecode(b"a", sections=b"\0\x03\x01"),  # a second string section
        bytecode(b"a", sections=b"\x0a\x01"),  # a section that no version has
        bytecode(b"a")[:-1],
        bytecode(b"a").replace(b"a\0", b"a\0b\0"),
    ],
)
def test_unscannable(program: bytes) -> None:
    assert reason(program) == "unscannable"


@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes(raw: bytes, as_bytecode: bool) -> None:
    assert reason(BYTECODE_MAGIC + raw if as_bytecode else raw) in {"raw", "unscannable", "unparsed_custom_call"}


@given(st.data())
def test_damaged_modules(modules: list[Path], data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from([m for m in modules if m.stat().st_size < 10_000])).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 400)))] = data.draw(st.integers(0, 255))
    assert reason(bytes(raw)) in {"raw", "unscannable", "unparsed_custom_call"}


def test_counts_out_of_text(modules: list[Path]) -> None:
    program = b"module attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 2 : i32} {}"
    assert (text_count(program, "mhlo.num_partitions"), text_count(program, "mhlo.num_replicas")) == (4, 2)
    assert text_count(TEXT, "mhlo.num_partitions") is None
    assert text_count(modules[0].read_bytes(), "mhlo.num_partitions") is None


def test_a_head_of_comments_costs_no_more_than_its_length() -> None:
    started = time.perf_counter()
    for head in (b"#" * 50_000 + b"\t", b"//\n" * 20_000 + b"x", b"#\t" * 30_000, b"# \n \n" * 10_000):
        with pytest.raises(Bypass):
            scan(head + b"program")
    assert time.perf_counter() - started < 2.0
