"""Fuzzes the reader of compile options: any bytes give components, or InvalidRequest."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core.canonical.options import device_count, options_components
    from torchtpu_cache_core.errors import InvalidRequest
    from torchtpu_cache_core.key import Component, key_of


def one_input(data: bytes) -> None:
    for position_independent in (False, True):
        try:
            components = options_components(data, position_independent=position_independent, noted={})
        except InvalidRequest:
            continue
        assert components == options_components(data, position_independent=position_independent, noted={})
        assert key_of([Component.of("scheme", "ttc1"), *components])
        assert device_count(data) >= 1


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
