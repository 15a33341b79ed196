"""Every call of the protocol against a real service."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.served import Answer, Served, path_of
from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.manifest import Manifest
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.testing.entries import entry_for, key_for, rival_of


def _manifest(answer: Answer) -> Manifest:
    return Manifest.from_header(answer.headers["torchtpu-cache-manifest"])


@pytest.mark.parametrize("size_bytes", [0, 1, 10_000, 256 << 10, 3 << 20])
def test_what_was_put_comes_back(served: Served, size_bytes: int) -> None:
    entry = entry_for(f"round trip {size_bytes}", size_bytes=size_bytes)
    created = served.put(entry)
    assert (created.status, created.headers["etag"]) == (201, wire.etag(entry.digest))
    for _ in range(2):  # the first is checked on disk, the second comes from memory's knowledge
        answer = served.get(entry)
        assert answer.status == 200
        assert answer.body == bytes(entry.buffer)
        assert answer.headers["content-type"] == wire.ENTRY_CONTENT_TYPE
        assert wire.parse_content_digest(answer.headers["content-digest"]) == entry.digest
        manifest = _manifest(answer)
        manifest.check(DEFAULT_NAMESPACE, entry.key, entry.digest)
        assert (manifest.generation, manifest.writer, manifest.size_bytes) == (1, "local", entry.size_bytes)


def test_a_head_says_the_same_without_bytes(served: Served) -> None:
    entry = entry_for("head")
    missing = served.ask("HEAD", path_of(entry))
    assert (missing.status, missing.body) == (404, b"")
    assert missing.headers["torchtpu-cache-problem"] == "not_found"
    served.put(entry)
    head, get = served.ask("HEAD", path_of(entry)), served.get(entry)
    assert (head.status, head.body) == (200, b"")
    assert {**head.headers, "date": ""} == {**get.headers, "date": ""}


def test_a_known_digest_is_not_sent_again(served: Served) -> None:
    entry = entry_for("known")
    served.put(entry)
    for known in (wire.etag(entry.digest), f'"other", W/{wire.etag(entry.digest)}', "*"):
        answer = served.get(entry, If_None_Match=known)
        assert (answer.status, answer.body) == (304, b"")
        assert answer.headers["etag"] == wire.etag(entry.digest)
    assert served.get(entry, If_None_Match='"other"').status == 200


def test_a_range_gets_the_whole_entry(served: Served) -> None:
    entry = entry_for("range")
    served.put(entry)
    answer = served.get(entry, Range="bytes=0-9")
    assert (answer.status, len(answer.body)) == (200, entry.size_bytes)


def test_the_first_entry_of_a_key_wins(served: Served) -> None:
    entry = entry_for("first")
    rival = rival_of(entry)
    assert served.put(entry).status == 201
    same = served.put(entry)
    assert (same.status, same.headers["etag"]) == (200, wire.etag(entry.digest))
    assert "connection" not in same.headers
    lost = served.put(rival)
    assert (lost.status, lost.kind, lost.json["digest"]) == (409, "conflict", entry.digest)
    assert _manifest(lost).digest == entry.digest
    assert served.get(entry).body == bytes(entry.buffer)


def test_of_many_puts_at_once_one_wins(served: Served) -> None:
    entries = [entry_for("contended", executable=f"by {i}".encode() * 50_000) for i in range(8)]
    start = threading.Barrier(len(entries))

    def put(entry: Entry) -> Answer:
        start.wait()
        return served.put(entry)

    with ThreadPoolExecutor(len(entries)) as pool:
        answers = list(pool.map(put, entries))
    assert Counter(answer.status for answer in answers) == {201: 1, 409: 7}
    winner = next(answer.headers["etag"] for answer in answers if answer.status == 201)
    assert {answer.headers["etag"] for answer in answers} == {winner}
    assert served.get(entries[0]).headers["etag"] == winner


def test_equal_entries_of_two_namespaces_live_apart(served: Served) -> None:
    entry = entry_for("twice")
    assert served.put(entry, "team-a").status == served.put(entry, "team-b").status == 201
    assert served.ask("DELETE", path_of(entry, "team-a")).status == 204
    assert served.get(entry, "team-a").status == 404
    assert served.get(entry, "team-b").body == bytes(entry.buffer)


def test_a_deleted_key_is_free_and_its_next_generation_higher(served: Served) -> None:
    entry = entry_for("deleted")
    assert served.ask("DELETE", path_of(entry)).kind == "not_found"
    served.put(entry)
    gone = served.ask("DELETE", path_of(entry))
    assert (gone.status, gone.body) == (204, b"")
    assert served.get(entry).kind == "not_found"
    assert _manifest(served.put(rival_of(entry))).generation == 2


def test_listing_in_pages(served: Served) -> None:
    entries = {e.key: e for e in (entry_for(f"page {i}", compile_seconds=i + 0.5) for i in range(7))}
    for entry in entries.values():
        served.put(entry, "paged")
    listed, cursor = [], ""
    while True:
        answer = served.ask("GET", f"/v1/paged/entries?limit=3&cursor={cursor}")
        page = wire.Page.from_json(answer.json)
        listed += page.entries
        if page.cursor is None:
            break
        cursor = page.cursor
    assert [info.key for info in listed] == sorted(entries)
    for info in listed:
        entry = entries[info.key]
        assert (info.size_bytes, info.compile_seconds) == (entry.size_bytes, entry.header.compile_seconds)
    key = listed[3].key
    for prefix in (key, key.short, key.hexdigest[:12]):
        found = served.ask("GET", f"/v1/paged/entries?prefix={prefix}").json["entries"]
        assert [item["key"] for item in found] == [key]
    assert served.ask("GET", "/v1/paged/entries?target=nothing").json == {"entries": [], "cursor": None}
    assert len(served.ask("GET", "/v1/paged/entries?target=cpu").json["entries"]) == 7
    stats = served.ask("GET", "/v1/paged/stats").json
    assert stats["entries"] == 7
    assert stats["size_bytes"] >= sum(e.size_bytes for e in entries.values())
    assert served.ask("GET", "/v1/never-written/entries").json == {"entries": [], "cursor": None}


def test_looking_up_many_keys(served: Served) -> None:
    entries = [entry_for(f"looked up {i}", compile_seconds=2.5) for i in range(3)]
    for entry in entries:
        served.put(entry)
    keys = [e.key for e in entries] + [key_for(f"absent {i}") for i in range(997)]
    answer = served.ask("POST", "/v1/default/lookup", json.dumps(wire.lookup_request(keys)).encode())
    found = wire.parse_lookup_response(answer.json)
    assert found == {e.key: wire.Found(e.digest, e.size_bytes, 2.5) for e in entries}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"keys": "x"}',
        b'{"keys": ["../../etc/passwd"]}',
        b'{"keys": [1]}',
        b'{"keys": [], "more": 1}',
        b"[" * 100_000,
        b'{"keys": [' + b",".join(b'"%s"' % key_for("k").encode() for _ in range(1001)) + b"]}",
        b"\xff\xfe",
    ],
)
def test_a_senseless_look_up_is_refused(served: Served, body: bytes) -> None:
    answer = served.ask("POST", "/v1/default/lookup", body)
    assert (answer.status, answer.kind) == (400, "invalid")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nothing/here", 404, "no_such_path"),
        ("GET", "/v1/default/entries/", 404, "no_such_path"),
        ("GET", "/v2/default/entries/x", 404, "no_such_path"),
        ("GET", "/v1/default/entries/not-a-key", 400, "invalid"),
        ("GET", "/v1/UPPER/entries", 400, "invalid"),
        ("GET", f"/v1/UPPER/entries/{key_for('x')}", 400, "invalid"),
        ("DELETE", "/v1/default/entries/not-a-key", 400, "invalid"),
        ("GET", "/v1/default/entries?limit=0", 422, "invalid"),
        ("GET", "/v1/default/entries?limit=1001", 422, "invalid"),
        ("GET", "/v1/default/entries?cursor=x", 400, "invalid"),
        ("GET", "/v1/default/entries?prefix=%2e%2e", 400, "invalid"),
        ("POST", "/v1/default/entries", 405, "method"),
        ("PATCH", f"/v1/default/entries/{key_for('x')}", 405, "method"),
        ("PUT", "/healthz", 405, "method"),
        ("DELETE", "/v1/default/entries", 405, "method"),
    ],
)
def test_every_error_is_a_problem(served: Served, method: str, path: str, status: int, kind: str) -> None:
    answer = served.ask(method, path)
    assert (answer.status, answer.kind) == (status, kind)
    assert answer.json["type"] == f"urn:torchtpu-cache:problem:{kind}"
    assert answer.json["detail"]
    assert status != 405 or answer.headers["allow"]


def test_the_document_lists_every_route(served: Served) -> None:
    document = served.ask("GET", "/openapi.json").json
    assert document["openapi"].startswith("3.")
    calls = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    entry = "/v1/{namespace}/entries/{key}"
    assert calls == {
        *((method, entry) for method in ("GET", "HEAD", "PUT", "DELETE")),
        ("GET", "/v1/{namespace}/entries"),
        ("POST", "/v1/{namespace}/lookup"),
        ("GET", "/v1/{namespace}/stats"),
        *(("GET", path) for path in ("/healthz", "/readyz", "/metrics")),
    }
    assert {"400", "403", "404"} <= set(document["paths"][entry]["delete"]["responses"])
    assert "503" in document["paths"]["/readyz"]["get"]["responses"]
    for method in ("get", "head"):
        assert "If-None-Match" in {p["name"] for p in document["paths"][entry][method]["parameters"]}
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    for reference in _references(document):
        found = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]
    for operation in operations:
        names = {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"}
        assert operation["summary"]
        assert operation["responses"]
        assert all(p["required"] for p in operation.get("parameters", []) if p["name"] in names)


def _references(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [found for item in value.values() for found in _references(item)]
    return [found for item in value for found in _references(item)] if isinstance(value, list) else []


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(served: Served, path: str) -> None:
    page = served.ask("GET", path)
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for loader in (b"http://", b"https://", b"<script", b"src=", b"@import", b"url("):
        assert loader not in page.body


def test_probes(served: Served) -> None:
    assert served.ask("GET", "/healthz").json == {"status": "alive"}
    assert served.ask("GET", "/readyz").json == {"status": "ready"}


def test_metrics_count_by_bounded_labels(served: Served) -> None:
    before = _samples(served)
    entry = entry_for("metered", size_bytes=5000)
    served.get(entry, "metered-namespace")
    served.put(entry, "metered-namespace")
    served.put(entry, "metered-namespace")
    served.put(rival_of(entry), "metered-namespace")
    served.get(entry, "metered-namespace")
    served.get(entry, "metered-namespace", If_None_Match="*")
    served.ask("GET", f"/random/{entry.key}")
    after = _samples(served)

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    prefix = "torchtpu_cache_service_"
    for outcome in ("hit", "miss", "not_modified"):
        assert grown(f'{prefix}reads_total{{outcome="{outcome}"}}') == 1
    for outcome in ("created", "same", "conflict"):
        assert grown(f'{prefix}puts_total{{outcome="{outcome}"}}') == 1
    assert grown(f'{prefix}reads_total{{outcome="error"}}') == 0
    assert grown(f"{prefix}sent_bytes_total") == entry.size_bytes
    assert grown(f"{prefix}received_bytes_total") == entry.size_bytes
    assert grown(f"{prefix}entries") == 1
    assert grown(f'{prefix}requests_total{{method="GET",route="other",status="404"}}') == 1
    text = "\n".join(after)
    for secret in (entry.key, entry.key.hexdigest, "metered-namespace", "/v1/", str(served.data_dir)):
        assert secret not in text


def _samples(served: Served) -> dict[str, float]:
    lines = served.ask("GET", "/metrics").body.decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
