from __future__ import annotations

import pytest

from torchtpu_cache.compilers.messages import last_words, shorten

NOISE = "I1130 11:51:58.903340    5765 pjrt_client.cc:579] PjRt-IFRT device count: total=2, addressable=2\n"


@pytest.mark.parametrize(
    ("message", "short"),
    [
        ("UNKNOWN: -:1:1: error: custom op 'hello' is unknown\n", "custom op 'hello' is unknown"),
        ("-:1:1: error: first.\n<unknown>:0: error: second.\nthird", "first.; second"),
        ("model.py:12:4: error: bad shape", "bad shape"),
        ("RESOURCE_EXHAUSTED: out of HBM", "RESOURCE_EXHAUSTED: out of HBM"),
        ("  \n\n", "the compiler gave no reason"),
        ("a\x1b[31mb\tc", "a [31mb c"),
        (
            "UNKNOWN: -:1:1: error: custom op 'not' is unknown\nFailed to parse using StableHLO v1.17.0, this could "
            "indicate forward incompatibility, >12w old unsupported plugin, or a portable artifact",
            "it is no StableHLO module that this XLA can read (up to v1.17.0): custom op 'not' is unknown",
        ),
        ("Failed to parse using StableHLO", "it is no StableHLO module that this XLA can read"),
    ],
)
def test_a_message_becomes_a_sentence(message: str, short: str) -> None:
    assert shorten(message) == short


def test_a_message_has_a_bound() -> None:
    assert len(shorten("x" * 1_000_000)) == 400


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            NOISE + "F1130 11:51:59.072629    5781 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_x=1\n",
            "Unknown flag in XLA_FLAGS: --xla_x=1",
        ),
        (
            "F0000 00:00:1796039518.313030    5756 partition.cc:269] Check failed: a == 1 (2 vs. 1)\n"
            "*** Check failure stack trace: ***\n    @     0x7f0  absl::Log()\n    @     0x7f1  (unknown)\n",
            "Check failed: a == 1 (2 vs. 1)",
        ),
        (NOISE + "ERROR: Unknown command line flag 'xla_x'\n" + NOISE, "ERROR: Unknown command line flag 'xla_x'"),
        ("LLVM ERROR: out of memory\n#0 0x7f llvm::sys\n", "LLVM ERROR: out of memory"),
    ],
)
def test_the_fatal_line_is_found(stderr: str, words: str) -> None:
    assert last_words(stderr) == words


def test_a_silent_death_is_told_with_what_came_last() -> None:
    assert "killed from outside" in last_words("")
    assert last_words(NOISE).endswith("the last that it printed is: PjRt-IFRT device count: total=2, addressable=2")
