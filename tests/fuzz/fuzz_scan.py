"""Fuzzes the byte scan of programs: any bytes have an identity, or are bypassed."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core.canonical.scan import scan, text_count
    from torchtpu_cache_core.errors import Bypass


def one_input(data: bytes) -> None:
    for program in (data, b"ML\xefR" + data, b"module {" + data):
        try:
            assert scan(program) == scan(program)
        except Bypass as bypass:
            assert bypass.reason
        text_count(program, "mhlo.num_partitions")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
