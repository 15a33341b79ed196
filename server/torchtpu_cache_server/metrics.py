"""Counters of the service, in a registry of their own. Labels are bounded: no key, namespace or path is one."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from torchtpu_cache_core.store import StoreStats

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_METHODS: Final = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"})
_PREFIX: Final = "torchtpu_cache_service"
_HITS_AT_ONCE: Final = 100
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """What `/metrics` shows. Thread-safe."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            f"{_PREFIX}_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            f"{_PREFIX}_request_seconds",
            "Seconds from a request's head to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._reads = Counter(
            f"{_PREFIX}_reads", "Reads of entries by what they found.", ["outcome"], registry=registry
        )
        self._puts = Counter(f"{_PREFIX}_puts", "Puts by what became of them.", ["outcome"], registry=registry)
        self._failures = Counter(
            f"{_PREFIX}_failures", "Failures of the service's own storage; no miss is one.", ["kind"], registry=registry
        )
        self.sent_bytes = Counter(f"{_PREFIX}_sent_bytes", "Bytes of entries sent.", registry=registry)
        self.received_bytes = Counter(f"{_PREFIX}_received_bytes", "Bytes of entries received.", registry=registry)
        self.evictions = Counter(f"{_PREFIX}_evictions", "Entries that had to make room.", registry=registry)
        self.condemned = Counter(f"{_PREFIX}_condemned", "Entries whose bytes turned out bad.", registry=registry)
        self.uploads = Gauge(f"{_PREFIX}_uploads_running", "Puts under way.", registry=registry)
        self._entries = Gauge(f"{_PREFIX}_entries", "Entries held.", registry=registry)
        self._size = Gauge(f"{_PREFIX}_size_bytes", "Bytes held, as the limits count them.", registry=registry)
        self._limit = Gauge(f"{_PREFIX}_limit_bytes", "The limit of size_bytes.", registry=registry)
        self._limit_entries = Gauge(f"{_PREFIX}_limit_entries", "The limit of entries.", registry=registry)
        self._index_complete = Gauge(
            f"{_PREFIX}_index_complete", "1 unless the index is being rebuilt.", registry=registry
        )
        # `labels` costs more than to count, so that what a read counts is looked up once.
        self._reads_by = {outcome: self._reads.labels(outcome) for outcome in ("hit", "not_modified", "miss", "error")}
        self._hits: list[tuple[int, float]] = []
        self._requests_by: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        for outcome in ("created", "same", "conflict", "refused", "error"):
            self._puts.labels(outcome)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request has ended; `route` is the name of one of ours or `other`."""
        requests, durations = self._of_request(method, route, status)
        requests.inc()
        durations.observe(seconds)

    def _of_request(self, method: str, route: str, status: int) -> tuple[Counter, Histogram]:
        name = method if method in _METHODS else "other", route, status
        found = self._requests_by.get(name)
        if found is None:
            found = self._requests.labels(name[0], route, str(status)), self._seconds.labels(route)
            self._requests_by[name] = found
        return found

    def hit(self, size_bytes: int, seconds: float) -> None:
        """A read was answered with an entry. For the event loop only; it is counted with the next hundred of them."""
        self._hits.append((size_bytes, seconds))
        if len(self._hits) >= _HITS_AT_ONCE:
            self._count_hits()

    def _count_hits(self) -> None:
        hits, self._hits = self._hits, []
        if not hits:
            return
        requests, durations = self._of_request("GET", "entry", 200)
        requests.inc(len(hits))
        for _, seconds in hits:
            durations.observe(seconds)
        self._reads_by["hit"].inc(len(hits))
        self.sent_bytes.inc(sum(size_bytes for size_bytes, _ in hits))

    def read(self, outcome: str) -> None:
        """`hit`, `not_modified`, `miss` or `error`."""
        self._reads_by[outcome].inc()

    def put(self, outcome: str) -> None:
        """`created`, `same`, `conflict`, `refused` (the client's fault) or `error` (ours)."""
        self._puts.labels(outcome).inc()

    def failure(self, kind: str) -> None:
        """`kind` is a FailureKind."""
        self._failures.labels(kind).inc()

    def render(self, stats: StoreStats, *, index_complete: bool) -> bytes:
        """The exposition text. For the event loop only, as `hit`."""
        self._count_hits()
        self._entries.set(stats.entries)
        self._size.set(stats.size_bytes)
        self._limit.set(stats.limit_bytes or 0)
        self._limit_entries.set(stats.limit_entries or 0)
        self._index_complete.set(index_complete)
        return generate_latest(self.registry)
