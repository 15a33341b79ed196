"""The remote tier: entries of one namespace of a service, over HTTP (docs/http.md).

What counts as what, in one place (`_failure`): a miss is a 404 that this project's service wrote, and nothing else. A
404 of a stray web server, a login page or a redirect is a refusal (PROTOCOL), an outage is an outage.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from torchtpu_cache.connection import Answer, Patience, Question
from torchtpu_cache.sizelimit import SizeLimit
from torchtpu_cache.transport import Transport
from torchtpu_cache_core import wire
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.endpoint import Endpoint
from torchtpu_cache_core.entry import MAX_ENTRY_BYTES, Entry, Verifier
from torchtpu_cache_core.errors import (
    CorruptEntry,
    CorruptReason,
    EntryTooLarge,
    FailureKind,
    InvalidName,
    InvalidRequest,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from torchtpu_cache_core.jsontext import strict_json_object
from torchtpu_cache_core.manifest import Attestation, Manifest
from torchtpu_cache_core.names import Digest, Key, Namespace
from torchtpu_cache_core.store import Capabilities, EntryInfo, PutOutcome, PutStatus, Store, Stored, StoreStats

if TYPE_CHECKING:
    import ssl

_PIECE_BYTES: Final = 256 << 10
_LAZY_FROM_BYTES: Final = 1 << 20
_MAX_PROBLEM_BYTES: Final = 64 << 10
_MAX_JSON_BYTES: Final = 8 << 20
_MAX_CURSOR: Final = 1000
_MAX_RETRY_AFTER_SECONDS: Final = 300.0
_SECONDS: Final = re.compile(r"[0-9]{1,9}")
_CORRUPT_REASONS: Final = frozenset(CorruptReason)
_SAID_WITH_503: Final = frozenset({FailureKind.IO, FailureKind.TIMEOUT, FailureKind.SERVER_ERROR})
"""What our service tells of its own storage; a 503 of anyone else means too many requests."""


class RemoteStore(Store):
    """Entries of `namespace` in the service at `url`.

    Nothing is sent until the first call. Every call is bounded in time and memory, and raises StoreError only.

    Args:
        url: `http://127.0.0.1:8077` or like it; only loopback, until there is authentication.
        connect_seconds: to connect. A service that is down costs a call no more than this.
        answer_seconds: from the question to its answer's head, and between two pieces of its body. A service that
            hangs costs a call no more than this.
        idle_seconds: between two pieces of an upload, and until it is acknowledged.
        max_entry_bytes: larger entries are neither fetched nor sent.
        ssl_context: for https; checks against the system's certificates by default.

    Raises:
        ConfigError: the URL is not one that may be used, or a time is not positive.
    """

    def __init__(
        self,
        url: str,
        namespace: Namespace,
        *,
        connect_seconds: float = 0.05,
        answer_seconds: float = 2.0,
        idle_seconds: float = 10.0,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        ssl_context: ssl.SSLContext | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._namespace = namespace
        self._clock = clock
        self._max_entry_bytes = max_entry_bytes
        self._transport = Transport(
            Endpoint.parse(url),
            Patience(connect_seconds=connect_seconds, answer_seconds=answer_seconds, idle_seconds=idle_seconds),
            clock=clock,
            ssl_context=ssl_context,
        )
        self._size_limit = SizeLimit(clock)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(name="remote", durable=True, shared=True, evicts=True, keeps_attestation=False)

    def get(self, key: Key) -> Stored | None:
        question = Question("GET", wire.entry_path(self._namespace, key), {"Accept": wire.ENTRY_CONTENT_TYPE})
        with self._transport.exchange(question) as answer:
            if answer.status == 200:
                return self._read_entry(key, answer)
            problem = self._problem(answer)
            if _is_miss(answer, problem):
                return None
            raise self._failure(answer, problem)

    def put(self, entry: Entry, attestation: Attestation | None = None) -> PutOutcome:
        """As the contract says. The attestation is not sent: manifests are the service's to write.

        A limit that the service named, or a size at which uploads break off, is remembered for a while; an entry
        over it raises EntryTooLarge without traffic.
        """
        size = entry.size_bytes
        if size > self._max_entry_bytes:
            raise EntryTooLarge(size, self._max_entry_bytes)
        self._size_limit.check(size)
        headers = {
            "Content-Type": wire.ENTRY_CONTENT_TYPE,
            wire.CONTENT_DIGEST_HEADER: wire.content_digest(entry.digest),
        }
        question = Question("PUT", wire.entry_path(self._namespace, entry.key), headers, entry.buffer)
        try:
            with self._transport.exchange(question) as answer:
                outcome = self._read_outcome(entry, answer)
        except EntryTooLarge as error:
            self._size_limit.refused(size, error.limit_bytes)
            raise
        except StoreUnavailable as error:
            if error.kind is FailureKind.RESET:
                self._size_limit.broke_off(size)
            raise
        self._size_limit.accepted(size)
        return outcome

    def contains(self, key: Key) -> bool:
        with self._transport.exchange(Question("HEAD", wire.entry_path(self._namespace, key))) as answer:
            if answer.status == 200 and wire.MANIFEST_HEADER.lower() in answer.headers:
                return True
            if answer.status == 404 and answer.headers.get(wire.PROBLEM_HEADER.lower()) == wire.NOT_FOUND:
                return False
            raise self._failure(answer, None)

    def delete(self, key: Key) -> bool:
        with self._transport.exchange(Question("DELETE", wire.entry_path(self._namespace, key))) as answer:
            if answer.status in (200, 204):
                return True
            problem = self._problem(answer)
            if _is_miss(answer, problem):
                return False
            raise self._failure(answer, problem)

    def iterate(self) -> Iterator[EntryInfo]:
        """Asks page by page; a page that fails raises where the listing has come to."""
        cursor: str | None = None
        while True:
            query = f"?limit={wire.MAX_PAGE}" + ("" if cursor is None else f"&cursor={quote(cursor, safe='')}")
            body = self._ask_json(Question("GET", wire.entries_path(self._namespace) + query))
            try:
                page = wire.Page.from_json(body)
            except (InvalidName, InvalidRequest) as error:
                raise self._not_our_service("a page that cannot be read") from error
            yield from page.entries
            # A page without entries, or a cursor that stands still, would make the listing endless.
            if page.cursor is None or page.cursor == cursor or not page.entries:
                return
            if len(page.cursor) > _MAX_CURSOR:
                raise self._not_our_service("a page that cannot be read")
            cursor = page.cursor

    def stats(self) -> StoreStats:
        """Of this namespace; the limits are those of the whole service."""
        match self._ask_json(Question("GET", wire.stats_path(self._namespace))):
            case {
                "entries": int(entries),
                "size_bytes": int(size_bytes),
                "limit_bytes": int() | None as limit_bytes,
                "limit_entries": int() | None as limit_entries,
            }:
                return StoreStats(
                    entries=entries, size_bytes=size_bytes, limit_bytes=limit_bytes, limit_entries=limit_entries
                )
        raise self._not_our_service("counts that cannot be read")

    def lookup(self, keys: Sequence[Key]) -> dict[Key, wire.Found]:
        """What the service has of `keys`, asked 1,000 at a time; absent keys are misses. StoreError as in `get`."""
        found: dict[Key, wire.Found] = {}
        for start in range(0, max(1, len(keys)), wire.MAX_LOOKUP_KEYS):
            asked = keys[start : start + wire.MAX_LOOKUP_KEYS]
            raw = json.dumps(wire.lookup_request(asked)).encode()
            question = Question("POST", wire.lookup_path(self._namespace), {"Content-Type": "application/json"}, raw)
            try:
                answered = wire.parse_lookup_response(self._ask_json(question))
            except (InvalidName, InvalidRequest) as error:
                raise self._not_our_service("a look-up that cannot be read") from error
            found |= {key: answered[key] for key in asked if key in answered}
        return found

    def ping(self) -> float:
        """Asks for nothing, and gives the seconds that the answer took; StoreError where our service did not answer."""
        started = self._clock.monotonic()
        self.lookup(())
        return self._clock.monotonic() - started

    def close(self) -> None:
        self._transport.close()

    def _read_entry(self, key: Key, answer: Answer) -> Stored:
        size = answer.length
        if _content_type(answer) != wire.ENTRY_CONTENT_TYPE or size is None:
            raise self._not_our_service("an answer that is no entry")
        if size > self._max_entry_bytes:
            raise EntryTooLarge(size, self._max_entry_bytes)
        buffer = _lazy_buffer(size)
        verifier = Verifier(MAX_ENTRY_BYTES)
        try:
            for start in range(0, size, _PIECE_BYTES):
                piece = buffer[start : start + _PIECE_BYTES]
                answer.readinto(piece)
                verifier.feed(piece)
                _check_head(key, verifier, size)
            header, digest = verifier.finish()
        except EntryTooLarge as error:
            raise CorruptEntry(CorruptReason.LENGTH, "declares more than the service sent") from error
        entry = Entry(header, digest, buffer.toreadonly(), verifier.frame, owned=True)
        entry.check(key)
        if answer.headers.get("etag") != wire.etag(digest):
            raise CorruptEntry(CorruptReason.DIGEST, "the service announced another digest")
        attestation = self._attestation(key, digest, answer)
        if attestation is None:
            raise self._not_our_service("an entry without its manifest")
        return Stored(entry, attestation)

    def _read_outcome(self, entry: Entry, answer: Answer) -> PutOutcome:
        if answer.status in (200, 201):
            # Any web server may say 200 to anything; only ours knows the digest.
            if answer.headers.get("etag") != wire.etag(entry.digest):
                raise self._not_our_service("an upload acknowledged without its digest")
            status = PutStatus.CREATED if answer.status == 201 else PutStatus.SAME
            return PutOutcome(status, entry.digest, self._attestation(entry.key, entry.digest, answer))
        problem = self._problem(answer)
        if answer.status == 409 and problem is not None:
            try:
                winner = Digest(problem.digest or "")
            except InvalidName:
                raise self._not_our_service("a conflict without a digest") from None
            return PutOutcome(PutStatus.CONFLICT, winner, self._attestation(entry.key, winner, answer))
        raise self._failure(answer, problem, sent_bytes=entry.size_bytes)

    def _attestation(self, key: Key, digest: Digest, answer: Answer) -> Attestation | None:
        value = answer.headers.get(wire.MANIFEST_HEADER.lower())
        if value is None:
            return None
        manifest = Manifest.from_header(value)
        manifest.check(self._namespace, key, digest)
        return Attestation(manifest)

    def _ask_json(self, question: Question) -> dict[str, Any]:
        with self._transport.exchange(question) as answer:
            if answer.status != 200:
                raise self._failure(answer, self._problem(answer))
            raw = answer.read(_MAX_JSON_BYTES) if _content_type(answer) == "application/json" else None
            body = None if raw is None else strict_json_object(raw)
            if body is None:
                raise self._not_our_service("an answer that is no JSON object")
            return body

    def _failure(self, answer: Answer, problem: wire.Problem | None, sent_bytes: int = 0) -> StoreError:
        """What an answer that is neither success nor miss means; the only place where a status becomes an error."""
        status, where = answer.status, self._transport.endpoint.authority
        said = f" ({problem.detail})" if problem is not None and problem.detail else ""
        kind = "" if problem is None else problem.kind
        if kind in _CORRUPT_REASONS or kind == FailureKind.CORRUPT:
            reason = CorruptReason.DIGEST if kind == FailureKind.CORRUPT else CorruptReason(kind)
            return CorruptEntry(reason, f"so says the remote {where}{said}")
        match status:
            case 401:
                return StoreRefused(f"the remote {where} wants authentication{said}", FailureKind.UNAUTHORIZED)
            case 403 if kind == FailureKind.READ_ONLY:
                return StoreRefused(f"the remote {where} is read-only{said}", FailureKind.READ_ONLY)
            case 403:
                return StoreRefused(f"the remote {where} does not allow this{said}", FailureKind.FORBIDDEN)
            case 408:
                return StoreUnavailable(f"the remote {where} gave up waiting{said}", FailureKind.TIMEOUT)
            case 413:
                return EntryTooLarge(sent_bytes, None if problem is None else problem.limit_bytes)
            case 503 if kind in _SAID_WITH_503:
                message = f"the remote {where} cannot answer now{said}"
                return StoreUnavailable(message, FailureKind(kind), _retry_after_seconds(answer))
            case 429 | 503:
                message = f"the remote {where} asks for less{said}"
                return StoreUnavailable(message, FailureKind.THROTTLED, _retry_after_seconds(answer))
            case 507:
                return StoreFull(f"the remote {where} is full{said}")
            case _ if status >= 500:
                message = f"the remote {where} failed with status {status}{said}"
                return StoreUnavailable(message, FailureKind.SERVER_ERROR)
        return self._not_our_service(f"status {status}{said}")

    def _not_our_service(self, what: str) -> StoreRefused:
        return StoreRefused(
            f"the remote {self._transport.endpoint.authority} gave {what}, which is not what this client speaks; "
            "check that the URL is that of a torchtpu-cache service",
            FailureKind.PROTOCOL,
        )

    def _problem(self, answer: Answer) -> wire.Problem | None:
        """The problem that our service wrote, or None where somebody else answered."""
        raw = answer.read(_MAX_PROBLEM_BYTES) if _content_type(answer) == wire.PROBLEM_CONTENT_TYPE else None
        body = None if raw is None else strict_json_object(raw)
        if body is None:
            return None
        problem = wire.Problem.from_json(body, answer.status)
        return problem if body.get("type") == problem.to_json()["type"] else None


def _lazy_buffer(size_bytes: int) -> memoryview:
    """Room for a body; of what a service only claims to send, no page is ever touched."""
    if size_bytes < _LAZY_FROM_BYTES:
        return memoryview(bytearray(size_bytes))
    try:
        return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (MemoryError, OSError) as error:
        raise StoreUnavailable(f"no memory for an entry of {size_bytes:,} bytes", FailureKind.IO) from error


def _check_head(key: Key, verifier: Verifier, size_bytes: int) -> None:
    """Refuses by its head what cannot be the answer, so that it is not fetched to its end."""
    if verifier.header is None:
        return  # not all of it is there
    if verifier.header.key != key:
        raise CorruptEntry(CorruptReason.KEY, "holds another key than the one asked for")
    declared = verifier.frame.entry_bytes
    if declared != size_bytes:
        reason = CorruptReason.SHORT if declared > size_bytes else CorruptReason.LENGTH
        raise CorruptEntry(reason, f"declares {declared:,} bytes, and the service sends {size_bytes:,}")


def _is_miss(answer: Answer, problem: wire.Problem | None) -> bool:
    return answer.status == 404 and problem is not None and problem.kind == wire.NOT_FOUND


def _content_type(answer: Answer) -> str:
    return answer.headers.get("content-type", "").partition(";")[0].strip().lower()


def _retry_after_seconds(answer: Answer) -> float | None:
    """Bounded, for it comes from outside; the form with a date is left aside."""
    value = answer.headers.get("retry-after", "")
    return min(float(value), _MAX_RETRY_AFTER_SECONDS) if _SECONDS.fullmatch(value) else None
