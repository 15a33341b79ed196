"""Fuzzes the readers of flags: any text of any road gives flags, the same ones each time."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core.canonical.environment import Environment
    from torchtpu_cache_core.errors import Bypass
    from torchtpu_cache_core.key import key_of


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    names = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_TOPOLOGY", "XLA_FLAGS_FILE")
    environ = {name: _text(provider) for name in names[: provider.ConsumeIntInRange(1, len(names))]}
    argv = ["job", *(_text(provider) for _ in range(provider.ConsumeIntInRange(0, 3)))]
    try:
        found = Environment.snapshot(environ, argv).components()
    except Bypass as bypass:
        assert bypass.reason
        return
    assert found == Environment.snapshot(environ, argv).components()
    if found:
        assert key_of(found)


def _text(provider: atheris.FuzzedDataProvider) -> str:
    raw: bytes = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 200))
    # As the environment gives them: no NUL, and bytes that are no UTF-8 as surrogates.
    return raw.replace(b"\0", b"").decode("utf-8", "surrogateescape")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
