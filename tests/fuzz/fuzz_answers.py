"""Fuzzes the client's reader of HTTP answers: whatever a peer says, a call has its result or raises StoreError.

The peer's bytes stand in a socket before the question is asked, and then the stream ends.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))

with atheris.instrument_imports():
    from support.replies import hit, miss, problem
    from torchtpu_cache.remote import RemoteStore
    from torchtpu_cache.transport import Transport
    from torchtpu_cache_core.errors import StoreError
    from torchtpu_cache_core.names import DEFAULT_NAMESPACE
    from torchtpu_cache_core.testing.entries import entry_for

_ENTRY = entry_for("fuzz", size_bytes=100)
_HEADS = [
    b"",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n",
    hit(_ENTRY)[:400],
    hit(_ENTRY),
    miss(),
    problem(409, "conflict", digest="0" * 64)[:-20],
]
_MOST_BYTES = 60_000  # what a socket takes without a reader


class _Said(Transport):
    """Connects to nobody: every connection begins with what `said` holds, and has ended then."""

    said = b""

    def _dial(self, address: str, timeout_seconds: float) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(self.said[:_MOST_BYTES])
        return ours


def one_input(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    call, head = provider.ConsumeIntInRange(0, 6), provider.ConsumeIntInRange(0, len(_HEADS) - 1)
    _Said.said = _HEADS[head] + provider.ConsumeBytes(_MOST_BYTES)
    with _store() as store, contextlib.suppress(StoreError):
        match call:
            case 0:
                found = store.get(_ENTRY.key)
                assert found is None or found.entry.digest == _ENTRY.digest or found.entry.key == _ENTRY.key
            case 1:
                store.put(_ENTRY)
            case 2:
                store.contains(_ENTRY.key)
            case 3:
                store.delete(_ENTRY.key)
            case 4:
                assert len(list(store.iterate())) <= 1000
            case 5:
                store.stats()
            case _:
                assert set(store.lookup([_ENTRY.key])) <= {_ENTRY.key}


def _store() -> RemoteStore:
    store = RemoteStore("http://127.0.0.1:1", DEFAULT_NAMESPACE, answer_seconds=0.5, idle_seconds=0.5)
    store._transport.__class__ = _Said
    return store


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
