"""What schemathesis needs to know of this API: bodies that are entries, and puts whose parts belong together.

Named by SCHEMATHESIS_HOOKS in the environment of its command.
"""

from __future__ import annotations

import hashlib
from typing import Any

import schemathesis
from hypothesis import strategies as st

from torchtpu_cache_core import wire
from torchtpu_cache_core.names import Digest
from torchtpu_cache_core.testing.entries import corruptions, entry_for, rival_of

_ENTRIES = [entry_for(f"schemathesis {number}", size_bytes=500) for number in range(8)]
_RIVALS = [rival_of(entry) for entry in _ENTRIES]
_BODIES = {bytes(entry.buffer): entry for entry in [*_ENTRIES, *_RIVALS]}
_BAD = [corruption.data for corruption in corruptions(_ENTRIES[0]) if len(corruption.data) < 100_000]

schemathesis.openapi.media_type(wire.ENTRY_CONTENT_TYPE, st.sampled_from([*_BODIES, *_BAD]) | st.binary(max_size=2000))


@schemathesis.serializer(wire.ENTRY_CONTENT_TYPE)
def _as_it_is(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    """Names a known key in every second request, and in a put the digest and key of what is sent."""
    if "key" not in (case.path_parameters or {}):
        return case
    chosen = hashlib.sha256(str(case.path_parameters).encode()).digest()[0]
    if chosen % 2:
        return case
    body = case.body if isinstance(case.body, bytes) else b""
    entry = _BODIES.get(body, _ENTRIES[chosen % len(_ENTRIES)])
    case.path_parameters = {**case.path_parameters, "namespace": "default", "key": str(entry.key)}
    if case.method == "PUT" and wire.CONTENT_DIGEST_HEADER in (case.headers or {}):
        digest = Digest(hashlib.sha256(body).hexdigest())
        case.headers = {**case.headers, wire.CONTENT_DIGEST_HEADER: wire.content_digest(digest)}
    return case
