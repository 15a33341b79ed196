"""Fuzzes what both sides read off the wire: JSON bodies, problems and digests are read, or refused as documented."""

from __future__ import annotations

import contextlib
import json
import sys

import atheris

with atheris.instrument_imports():
    from torchtpu_cache_core import wire
    from torchtpu_cache_core.errors import InvalidName, InvalidRequest
    from torchtpu_cache_core.jsontext import strict_json_object

_KEY = "ttc1-" + "0" * 64
_LISTED = {
    "key": _KEY,
    "size_bytes": 1,
    "executable_bytes": 1,
    "compile_seconds": 1.0,
    "created_seconds": 1.0,
    "accessed_seconds": 1.0,
    "target_name": "cpu",
    "pinned": False,
}
_BODIES = [
    json.dumps(body).encode()
    for body in (
        {"keys": [_KEY, _KEY]},
        {"found": {_KEY: {"digest": "0" * 64, "size_bytes": 1, "compile_seconds": 1.0}}},
        {"entries": [_LISTED], "cursor": _KEY},
        wire.Problem(413, "A title", "A sentence.", "too_large", 5, "0" * 64).to_json(),
    )
]


def one_input(data: bytes) -> None:
    """A body as it is, or a valid one with some bytes of it replaced."""
    provider = atheris.FuzzedDataProvider(data)
    kind, at, length = (provider.ConsumeIntInRange(0, most) for most in (len(_BODIES), 400, 40))
    rest = provider.ConsumeBytes(1 << 16)
    _read(rest if kind == len(_BODIES) else _BODIES[kind][:at] + rest + _BODIES[kind][at + length :])


def _read(data: bytes) -> None:
    text = data.decode("latin-1")
    with contextlib.suppress(InvalidRequest):
        digest = wire.parse_content_digest(text)
        assert wire.parse_content_digest(wire.content_digest(digest)) == digest
    body = strict_json_object(data)
    problem = wire.Problem.from_json(body, 500)
    assert wire.Problem.from_json(problem.to_json(), 500) == problem
    with contextlib.suppress(InvalidName, InvalidRequest):
        page = wire.Page.from_json(body)
        assert wire.Page.from_json(page.to_json()) == page
    with contextlib.suppress(InvalidName, InvalidRequest):
        keys = wire.parse_lookup_request(body)
        assert wire.parse_lookup_request(wire.lookup_request(keys)) == keys
    with contextlib.suppress(InvalidName, InvalidRequest):
        found = wire.parse_lookup_response(body)
        assert wire.parse_lookup_response(wire.lookup_response(found)) == found


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
