"""Fuzzes the entry's reader: pieces say the same as the whole, and nothing but documented errors comes out."""

from __future__ import annotations

import contextlib
import sys

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core.entry import PREFIX, Entry, Verifier
    from torchtpu_cache_core.errors import CorruptEntry, EntryTooLarge
    from torchtpu_cache_core.testing.entries import entry_for, header_fields, sealed

_GOOD = entry_for("fuzz", executable=b"".join(b"word %d " % i for i in range(300)))
_LIMIT_BYTES = 1 << 24


def _whole(data: bytes) -> object:
    try:
        entry = Entry.parse(data, _LIMIT_BYTES)
    except CorruptEntry as error:
        return error.reason
    except EntryTooLarge as error:
        return error.size_bytes
    with contextlib.suppress(CorruptEntry):
        assert len(entry.executable()) == entry.header.executable_bytes
    return entry.digest


def _pieces(data: bytes, step: int) -> object:
    verifier = Verifier(_LIMIT_BYTES)
    try:
        for start in range(0, len(data), step):
            verifier.feed(data[start : start + step])
        return verifier.finish()[1]
    except CorruptEntry as error:
        return error.reason
    except EntryTooLarge as error:
        return error.size_bytes


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    kind, step = provider.ConsumeIntInRange(0, 3), provider.ConsumeIntInRange(1, 64)
    rest = provider.ConsumeBytes(1 << 16)
    match kind:
        case 0:
            tried = rest
        case 1:
            tried = sealed(rest, b"payload")
        case 2:
            tried = sealed(header_fields(_GOOD), rest)
        case _:
            prefix = PREFIX.unpack(bytes(_GOOD.buffer[: PREFIX.size]))
            tried = PREFIX.pack(*prefix) + rest
    assert _pieces(tried, step) == _whole(tried)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
