"""What each answer of a service, or of something that is none, comes to: hit, miss, or which failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from support.rawserver import RawServer, answer, requests
from support.replies import entry_headers, head_of, hit, manifest_of, miss, problem
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core import wire
from torchtpu_cache_core.errors import (
    ConfigError,
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    FailureKind,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import EntryInfo, PutStatus, StoreStats
from torchtpu_cache_core.testing.clock import ManualClock
from torchtpu_cache_core.testing.entries import corruptions, entry_for, key_for, rival_of

ENTRY = entry_for("the entry", size_bytes=20_000)
OTHER = entry_for("another entry")
FOREIGN_PAGE = b"<html>404 not found, said nginx</html>"


@contextmanager
def remote_that_says(*replies: bytes) -> Iterator[tuple[RemoteStore, list[tuple[str, dict[str, str], bytes]]]]:
    """A store whose peer gives these answers in order, the last one for ever; and the requests that it saw."""
    seen: list[tuple[str, dict[str, str], bytes]] = []

    def script(connection) -> None:
        for request in requests(connection):
            seen.append(request)
            connection.sendall(replies[min(len(seen), len(replies)) - 1])

    with RawServer(script) as server, RemoteStore(server.url, DEFAULT_NAMESPACE) as store:
        yield store, seen


# ---- URLs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8077",
        "ftp://127.0.0.1/",
        "http://",
        "http:///v1",
        "http://127.0.0.1:port/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:0/",
        "http://[::1/",
        "http://127.0.0.1/?a=b",
        "http://127.0.0.1/#x",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/%0d%0aX:",
        "http://127.0.0.1/\r\nX: y",
        "http://user:hunter2@127.0.0.1/",
        "http://hunter2@127.0.0.1/",
        "http://10.0.0.1:8077",
        "https://cache.example.com",
        "http://0.0.0.0:8077",
        "http://127.0.0.1.example.com/",
        "http://localhost.example.com/",
        "http://2130706433/",
        "http://127.0.0.1" + "/a" * 2000,
    ],
)
def test_a_url_that_must_not_be_used_is_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RemoteStore(url, DEFAULT_NAMESPACE)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "path", "host"),
    [
        ("http://127.0.0.1:{port}", "", "127.0.0.1:{port}"),
        ("http://localhost:{port}/", "", "localhost:{port}"),
        ("HTTP://LOCALHOST:{port}/", "", "localhost:{port}"),
        ("http://127.0.0.1:{port}/behind/a-proxy/", "/behind/a-proxy", "127.0.0.1:{port}"),
    ],
)
def test_a_url_says_where_to_ask(url: str, path: str, host: str) -> None:
    seen: list[tuple[str, dict[str, str], bytes]] = []

    def script(connection) -> None:
        for request in requests(connection):
            seen.append(request)
            connection.sendall(miss())

    with RawServer(script) as server, RemoteStore(url.format(port=server.port), DEFAULT_NAMESPACE) as store:
        assert store.get(ENTRY.key) is None
        line, headers, _ = seen[0]
        assert line == f"GET {path}/v1/default/entries/{ENTRY.key} HTTP/1.1"
        assert headers["host"] == host.format(port=server.port)
        assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wait_that_is_no_time_is_refused(seconds: float) -> None:
    for name in ("connect_seconds", "answer_seconds", "idle_seconds"):
        with pytest.raises(ConfigError, match=name):
            RemoteStore("http://127.0.0.1:1", DEFAULT_NAMESPACE, **{name: seconds})


# ---- hits and misses -------------------------------------------------------------------------------------------


def test_a_hit_is_the_whole_checked_entry_with_its_manifest() -> None:
    with remote_that_says(hit(ENTRY)) as (store, _):
        stored = store.get(ENTRY.key)
    assert stored is not None
    assert bytes(stored.entry.buffer) == bytes(ENTRY.buffer)
    assert stored.entry.digest == ENTRY.digest
    assert stored.entry.buffer.readonly
    assert stored.attestation is not None
    assert stored.attestation.manifest == manifest_of(ENTRY)


def test_a_404_of_our_service_is_a_miss() -> None:
    with remote_that_says(miss()) as (store, _):
        assert store.get(ENTRY.key) is None
        assert store.delete(ENTRY.key) is False
    with remote_that_says(head_of(miss())) as (store, _):
        assert store.contains(ENTRY.key) is False


@pytest.mark.parametrize(
    "reply",
    [
        answer(404, FOREIGN_PAGE, "text/html"),
        answer(404),
        answer(404, b'{"detail":"Not Found"}', "application/json"),
        answer(404, b'{"title":"Not Found","status":404,"kind":"not_found"}', wire.PROBLEM_CONTENT_TYPE),
        answer(404, b'{"type":"about:blank","kind":"not_found"}', wire.PROBLEM_CONTENT_TYPE),
        answer(404, b"[]", wire.PROBLEM_CONTENT_TYPE),
        answer(404, b"x" * 100_000, wire.PROBLEM_CONTENT_TYPE),
        problem(404, "no_such_call"),
        answer(410, FOREIGN_PAGE, "text/html"),
    ],
)
def test_a_404_of_anyone_else_is_no_miss(reply: bytes) -> None:
    with remote_that_says(reply) as (store, _):
        for call in (store.get, store.delete):
            with pytest.raises(StoreRefused) as caught:
                call(ENTRY.key)
            assert caught.value.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize(
    "reply",
    [answer(404, FOREIGN_PAGE, "text/html"), answer(200, FOREIGN_PAGE, "text/html"), answer(302, Location="/x")],
)
def test_head_of_a_stranger_says_nothing(reply: bytes) -> None:
    with remote_that_says(head_of(reply)) as (store, _), pytest.raises(StoreRefused) as caught:
        store.contains(ENTRY.key)
    assert caught.value.kind is FailureKind.PROTOCOL


@pytest.mark.parametrize(
    "reply",
    [
        answer(200, FOREIGN_PAGE, "text/html"),
        answer(200, bytes(ENTRY.buffer), "application/octet-stream", **entry_headers(ENTRY)),
        answer(206, bytes(ENTRY.buffer), wire.ENTRY_CONTENT_TYPE, **entry_headers(ENTRY)),
        answer(204, b"", wire.ENTRY_CONTENT_TYPE),
        answer(301, Location="http://127.0.0.1:1/"),
        answer(307, Location="http://127.0.0.1:1/"),
        answer(304),
        answer(400),
        answer(421),
        hit(ENTRY, Content_Encoding="gzip"),
        hit(ENTRY, Transfer_Encoding="chunked"),
        hit(ENTRY, Content_Length="20000"),  # a second, other length
        b"HTTP/1.1 200 OK\r\nContent-Type: application/vnd.torchtpu-cache.entry\r\n\r\n" + bytes(ENTRY.buffer),
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\nContent-Type: application/vnd.torchtpu-cache.entry\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\nContent-Type: application/vnd.torchtpu-cache.entry\r\n\r\n",
    ],
)
def test_what_is_no_entry_is_refused_not_parsed(reply: bytes) -> None:
    with remote_that_says(reply) as (store, _), pytest.raises(StoreRefused) as caught:
        store.get(ENTRY.key)
    assert caught.value.kind is FailureKind.PROTOCOL


# ---- corrupt entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corruption", [c for c in corruptions(ENTRY) if not c.at_unpack], ids=lambda c: c.name)
def test_a_corrupt_entry_is_never_served(corruption) -> None:
    with remote_that_says(hit(ENTRY, corruption.data)) as (store, _), pytest.raises(CorruptEntry) as caught:
        store.get(ENTRY.key)
    assert caught.value.reason is corruption.reason


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (hit(OTHER), CorruptReason.KEY),
        (hit(rival_of(ENTRY), ETag=wire.etag(ENTRY.digest)), CorruptReason.DIGEST),
        (hit(ENTRY, ETag='"nonsense"'), CorruptReason.DIGEST),
        (hit(ENTRY, ETag=f"W/{wire.etag(ENTRY.digest)}"), CorruptReason.DIGEST),
        (hit(ENTRY, TorchTPU_Cache_Manifest="!"), CorruptReason.MANIFEST),
        (hit(ENTRY, TorchTPU_Cache_Manifest=manifest_of(OTHER).to_header()), CorruptReason.MANIFEST),
        (hit(ENTRY, TorchTPU_Cache_Manifest=manifest_of(rival_of(ENTRY)).to_header()), CorruptReason.MANIFEST),
        (problem(500, "corrupt"), CorruptReason.DIGEST),
        (problem(422, "key"), CorruptReason.KEY),
    ],
)
def test_an_answer_about_something_else_is_corrupt(reply: bytes, reason: CorruptReason) -> None:
    with remote_that_says(reply) as (store, _), pytest.raises(CorruptEntry) as caught:
        store.get(ENTRY.key)
    assert caught.value.reason is reason


def test_an_entry_without_manifest_is_refused() -> None:
    raw = hit(ENTRY).replace(wire.MANIFEST_HEADER.encode(), b"X-Something")
    with remote_that_says(raw) as (store, _), pytest.raises(StoreError) as caught:
        store.get(ENTRY.key)
    assert caught.value.kind is FailureKind.PROTOCOL


# ---- failures (A16) --------------------------------------------------------------------------------------------

REFUSALS: list[tuple[bytes, type[StoreError], FailureKind]] = [
    (answer(401, FOREIGN_PAGE, "text/html"), StoreRefused, FailureKind.UNAUTHORIZED),
    (problem(401, "unauthorized"), StoreRefused, FailureKind.UNAUTHORIZED),
    (answer(403), StoreRefused, FailureKind.FORBIDDEN),
    (problem(403, "forbidden"), StoreRefused, FailureKind.FORBIDDEN),
    (problem(403, "read_only"), StoreRefused, FailureKind.READ_ONLY),
    (answer(408), StoreUnavailable, FailureKind.TIMEOUT),
    (answer(429, Retry_After="7"), StoreUnavailable, FailureKind.THROTTLED),
    (answer(503, FOREIGN_PAGE, "text/html"), StoreUnavailable, FailureKind.THROTTLED),
    (problem(503, "throttled"), StoreUnavailable, FailureKind.THROTTLED),
    (problem(503, "io"), StoreUnavailable, FailureKind.IO),
    (answer(500), StoreUnavailable, FailureKind.SERVER_ERROR),
    (answer(502, FOREIGN_PAGE, "text/html"), StoreUnavailable, FailureKind.SERVER_ERROR),
    (answer(599), StoreUnavailable, FailureKind.SERVER_ERROR),
    (problem(507, "full"), StoreFull, FailureKind.FULL),
    (answer(507), StoreFull, FailureKind.FULL),
    (answer(418), StoreRefused, FailureKind.PROTOCOL),
    (answer(307, Location="/elsewhere"), StoreRefused, FailureKind.PROTOCOL),
    (answer(999), StoreUnavailable, FailureKind.SERVER_ERROR),
]


@pytest.mark.parametrize("method", ["get", "put", "contains", "delete", "iterate", "lookup", "ping"])
@pytest.mark.parametrize(("reply", "error", "kind"), REFUSALS)
def test_each_class_of_failure_has_its_kind(
    method: str, reply: bytes, error: type[StoreError], kind: FailureKind
) -> None:
    calls: dict[str, Callable[[RemoteStore], object]] = {
        "get": lambda store: store.get(ENTRY.key),
        "put": lambda store: store.put(ENTRY),
        "contains": lambda store: store.contains(ENTRY.key),
        "delete": lambda store: store.delete(ENTRY.key),
        "iterate": lambda store: list(store.iterate()),
        "lookup": lambda store: store.lookup([ENTRY.key]),
        "ping": lambda store: store.ping(),
    }
    reply = head_of(reply) if method == "contains" else reply
    with remote_that_says(reply) as (store, _), pytest.raises(error) as caught:
        calls[method](store)
    # HEAD has no body that could say why.
    if not (method == "contains" and kind in (FailureKind.READ_ONLY, FailureKind.IO)):
        assert caught.value.kind is kind
    assert ENTRY.key not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), ("0", 0.0), ("999999", 300.0), ("-1", None), ("soon", None), ("1e9", None), ("9" * 5000, None)],
)
def test_retry_after_is_bounded(value: str, seconds: float | None) -> None:
    with remote_that_says(answer(429, Retry_After=value)) as (store, _), pytest.raises(StoreUnavailable) as caught:
        store.get(ENTRY.key)
    assert caught.value.retry_after_seconds == seconds


def test_what_a_problem_says_reaches_the_person_and_no_control_characters() -> None:
    reply = answer(
        403,
        json.dumps(
            {"type": "urn:torchtpu-cache:problem:forbidden", "kind": "forbidden", "detail": "ask\x1b[31m Bob\n"}
        ).encode(),
        wire.PROBLEM_CONTENT_TYPE,
    )
    with remote_that_says(reply) as (store, _), pytest.raises(StoreRefused, match=r"\(ask\[31m Bob\)"):
        store.get(ENTRY.key)


# ---- put -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "outcome"), [(201, PutStatus.CREATED), (200, PutStatus.SAME)])
def test_put_sends_the_entry_as_it_is(status: int, outcome: PutStatus) -> None:
    with remote_that_says(answer(status, **entry_headers(ENTRY))) as (store, seen):
        result = store.put(ENTRY)
    line, headers, body = seen[0]
    assert (result.status, result.digest) == (outcome, ENTRY.digest)
    assert result.attestation is not None
    assert line == f"PUT /v1/default/entries/{ENTRY.key} HTTP/1.1"
    assert headers["content-digest"] == wire.content_digest(ENTRY.digest)
    assert headers["content-type"] == wire.ENTRY_CONTENT_TYPE
    assert body == bytes(ENTRY.buffer)


def test_a_conflict_names_the_winner() -> None:
    rival = rival_of(ENTRY)
    reply = problem(409, "conflict", digest=rival.digest, **entry_headers(rival))
    with remote_that_says(reply) as (store, _):
        outcome = store.put(ENTRY)
    assert (outcome.status, outcome.digest) == (PutStatus.CONFLICT, rival.digest)
    assert outcome.attestation is not None
    assert outcome.attestation.manifest == manifest_of(rival)


@pytest.mark.parametrize(
    "reply",
    [
        answer(200, b"welcome, please log in", "text/html"),
        answer(201),
        answer(201, **entry_headers(OTHER)),
        answer(204),
        answer(409),
        problem(409, "conflict"),
        problem(409, "conflict", digest="x" * 64),
    ],
)
def test_an_upload_counts_only_with_its_digest(reply: bytes) -> None:
    with remote_that_says(reply) as (store, _), pytest.raises(StoreRefused) as caught:
        store.put(ENTRY)
    assert caught.value.kind is FailureKind.PROTOCOL


# ---- lists and look-ups ----------------------------------------------------------------------------------------


def info(name: str) -> EntryInfo:
    return EntryInfo(
        key=key_for(name),
        size_bytes=10,
        executable_bytes=20,
        compile_seconds=1.5,
        created_seconds=2.0,
        accessed_seconds=3.0,
        target_name="cpu",
    )


def page(cursor: str | None, *names: str) -> bytes:
    return answer(200, json.dumps(wire.Page([info(n) for n in names], cursor).to_json()).encode(), "application/json")


def test_a_listing_is_asked_page_by_page() -> None:
    with remote_that_says(page("a/&=%\r\n b", "one", "two"), page(None, "three")) as (store, seen):
        assert [i.key for i in store.iterate()] == [key_for(n) for n in ("one", "two", "three")]
    assert seen[1][0].split(" ")[1].endswith("&cursor=a%2F%26%3D%25%0D%0A%20b")


def test_a_cursor_that_stands_still_ends_the_listing() -> None:
    with remote_that_says(page("same", "one")) as (store, seen):
        assert len(list(store.iterate())) == 2
    assert len(seen) == 2


def test_an_empty_page_ends_the_listing() -> None:
    with remote_that_says(page("one"), page("two")) as (store, seen):
        assert list(store.iterate()) == []
    assert len(seen) == 1


def test_a_cursor_without_end_is_refused() -> None:
    with remote_that_says(page("x" * 2000, "one")) as (store, _), pytest.raises(StoreRefused):
        list(store.iterate())


def test_stats_are_the_services() -> None:
    counts = {"entries": 3, "size_bytes": 40, "limit_bytes": 500, "limit_entries": None}
    with remote_that_says(answer(200, json.dumps(counts).encode(), "application/json")) as (store, seen):
        assert store.stats() == StoreStats(entries=3, size_bytes=40, limit_bytes=500)
    assert seen[0][0] == "GET /v1/default/stats HTTP/1.1"


def found(*names: str) -> bytes:
    value = wire.Found(ENTRY.digest, 10, 1.5)
    body = wire.lookup_response({key_for(name): value for name in names})
    return answer(200, json.dumps(body).encode(), "application/json")


def test_a_look_up_asks_a_thousand_keys_at_a_time_and_takes_no_others() -> None:
    keys = [key_for(str(i)) for i in range(1001)]
    with remote_that_says(found("3", "stranger"), found("1000", "3")) as (store, seen):
        assert list(store.lookup(keys)) == [keys[3], keys[1000]]
    assert [len(json.loads(body)["keys"]) for _, _, body in seen] == [1000, 1]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"nonsense", b'{"found": 1}', b'{"found": {"x": {}}}', b'{"a":1,"a":2}', b"[" * 100_000, b"\xff"],
)
def test_json_that_is_not_ours_is_refused(body: bytes) -> None:
    with remote_that_says(answer(200, body, "application/json")) as (store, _):
        for call in (lambda: store.lookup([ENTRY.key]), store.ping, store.stats, lambda: list(store.iterate())):
            with pytest.raises(StoreRefused) as caught:
                call()
            assert caught.value.kind is FailureKind.PROTOCOL


# ---- too large (A12) -------------------------------------------------------------------------------------------


def sizes_seen(seen: list[tuple[str, dict[str, str], bytes]]) -> list[int]:
    return [int(headers["content-length"]) for _, headers, _ in seen]


def test_a_named_limit_is_remembered_for_an_hour() -> None:
    clock, seen = ManualClock(), []
    small, large = entry_for("small", size_bytes=9_000), entry_for("large", size_bytes=11_000)

    def script(connection) -> None:
        for request in requests(connection):
            seen.append(request)
            is_large = int(request[1]["content-length"]) > 10_000
            connection.sendall(
                problem(413, "too_large", limit_bytes=10_000) if is_large else answer(201, **entry_headers(small))
            )

    with RawServer(script) as server, RemoteStore(server.url, DEFAULT_NAMESPACE, clock=clock) as store:
        for _ in range(3):
            with pytest.raises(EntryTooLarge) as caught:
                store.put(large)
            assert (caught.value.size_bytes, caught.value.limit_bytes) == (large.size_bytes, 10_000)
            assert store.put(small).status is PutStatus.CREATED
        assert sizes_seen(seen).count(large.size_bytes) == 1
        clock.advance(3601)
        with pytest.raises(EntryTooLarge):
            store.put(large)
        assert sizes_seen(seen).count(large.size_bytes) == 2


@pytest.mark.parametrize(
    "reply", [answer(413, FOREIGN_PAGE, "text/html"), problem(413, "too_large", limit_bytes=1 << 40)]
)
def test_a_limit_without_sense_still_counts_for_this_size(reply: bytes) -> None:
    with remote_that_says(reply) as (store, seen):
        for _ in range(2):
            with pytest.raises(EntryTooLarge):
                store.put(ENTRY)
        assert len(seen) == 1
        with pytest.raises(EntryTooLarge):
            store.put(OTHER)  # smaller: has to be tried
        assert len(seen) == 2


def test_an_entry_over_our_own_limit_is_neither_sent_nor_fetched() -> None:
    with remote_that_says(hit(ENTRY)) as (store, seen):
        small = RemoteStore(f"http://{store._transport.endpoint.authority}", DEFAULT_NAMESPACE, max_entry_bytes=10_000)
        with small:
            with pytest.raises(EntryTooLarge):
                small.put(ENTRY)
            assert seen == []
            with pytest.raises(EntryTooLarge):
                small.get(ENTRY.key)
