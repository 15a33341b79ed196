"""A read of an entry from the real service, beside nginx sending the very same file.

Both are one worker on one CPU, asked over loopback by a client in C on another CPU, which reads the heads and has the
kernel drop the bodies, so that it costs next to nothing. nginx runs as one would run it for files: sendfile,
tcp_nopush, connections kept alive, no log; it opens the file for each request, as it must where a delete has to show.
Entries do not compress, lie in the page cache, and were read once before (the service verifies an entry then).

One round asks nginx, the service, and nginx again, 8 connections each, and compares the service with the mean of the
two; of all rounds the median counts. Throughput counts the bytes of bodies that arrived, also of those that had not
ended. With large entries beside small ones (4 connections each), the 99th percentile of the small ones' latency is
compared. CPU per request is what the server's threads ran, the kernel's part of loopback included.

Told beside: nginx keeping its files open, and heads of which no two are the same, which the service has to parse (it
answers a head that it knows without that; docs/decisions/013).

Not in it: TLS, a real network card, a cold disk, many workers.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._nginx import running_nginx
from support.clean import clean_folder
from support.figures import Figure, Size
from support.load import Group, Load, LoadClient, cpu_seconds
from support.served import launch, path_of
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.testing.entries import entry_for

_EXECUTABLE_BYTES = {"10k": 10_000, "1m": 1_000_000, "32m": 32_000_000}
_BARS = {"10k": 0.3, "1m": 0.9, "32m": 0.9}
_CONNECTIONS = 8


def run(size: Size) -> Iterator[Figure]:
    with clean_folder() as folder, _sides(folder) as sides:
        rounds = size.of(2, 7)
        for name, bar in _BARS.items():
            seconds = size.of(300, 1200 if name == "10k" else 2000) / 1000
            yield from _compare(sides, name, bar, rounds, seconds)
        yield _mixed(sides, rounds, size.of(600, 3000) / 1000)


@dataclass(frozen=True, slots=True)
class _Side:
    """A server, and where it has each entry."""

    port: int
    pid: int
    paths: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Got:
    """By requests a second, CPU seconds per request, and latencies."""

    rate: float
    cpu_us: float
    load: Load


class _Sides:
    def __init__(
        self, client: LoadClient, sizes: dict[str, int], servers: dict[str, _Side], nginx_version: str
    ) -> None:
        self._client = client
        self._sizes = sizes
        self._servers = servers
        self.nginx_version = nginx_version

    def ask(self, server: str, name: str, seconds: float, *, heads_differ: bool = False) -> _Got:
        """One entry over 8 connections."""
        side = self._servers[server]
        before = cpu_seconds(side.pid)
        (load,) = self._client.run(side.port, seconds, self._group(side, name, _CONNECTIONS, heads_differ))
        requests = load.bytes / self._sizes[name]
        return _Got(requests / load.seconds, (cpu_seconds(side.pid) - before) / requests * 1e6, load)

    def ask_both(self, server: str, seconds: float) -> tuple[Load, Load]:
        """Small entries beside large ones, 4 connections each."""
        side = self._servers[server]
        groups = (self._group(side, name, _CONNECTIONS // 2, False) for name in ("10k", "32m"))
        small, large = self._client.run(side.port, seconds, *groups)
        return small, large

    def _group(self, side: _Side, name: str, connections: int, heads_differ: bool) -> Group:
        return Group(
            connections=connections,
            path=side.paths[name],
            body_bytes=self._sizes[name],
            heads_differ=heads_differ,
        )


@contextmanager
def _sides(folder: Path) -> Iterator[_Sides]:
    """nginx and the service on one CPU, and a client on another where there is one."""
    cpus = sorted(os.sched_getaffinity(0))
    serving, asking = cpus[0], (cpus[1] if len(cpus) > 1 else None)

    def pin() -> None:
        os.sched_setaffinity(0, {serving})

    (files := folder / "files").mkdir()
    (own := folder / "nginx").mkdir()
    client = LoadClient(folder, asking)
    served = launch(folder / "data", preexec=pin)
    try:
        with running_nginx(own, files, pin) as nginx:
            paths, sizes = {}, {}
            for name, executable_bytes in _EXECUTABLE_BYTES.items():
                entry = entry_for(name, executable=os.urandom(executable_bytes))
                assert served.put(entry).status == 201
                os.link(_blob(folder / "data", entry), files / name)
                assert served.get(entry).body == entry.buffer
                paths[name], sizes[name] = path_of(entry), entry.size_bytes
            of_nginx = {name: f"/{name}" for name in paths}
            servers = {
                "nginx": _Side(nginx.port, nginx.pid, of_nginx),
                "nginx_caching": _Side(nginx.caching_port, nginx.pid, of_nginx),
                "service": _Side(served.port, served.process.pid, paths),
            }
            sides = _Sides(client, sizes, servers, nginx.version)
            for server in servers:
                for name in sizes:
                    sides.ask(server, name, 0.05)
            yield sides
    finally:
        served.stop()


def _blob(data: Path, entry: Entry) -> Path:
    """The very file that the service sends."""
    (found,) = data.glob(f"blobs/sha256/*/{entry.digest!s}")
    return found


def _compare(sides: _Sides, name: str, bar: float, rounds: int, seconds: float) -> Iterator[Figure]:
    ratios, cpu_ratios, told = [], [], _Told()
    cached, differing = [], []
    for number in range(rounds):
        print(f"  {name}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        before, ours, after = (sides.ask(server, name, seconds) for server in ("nginx", "service", "nginx"))
        floor = (before.rate + after.rate) / 2
        ratios.append(ours.rate / floor)
        cpu_ratios.append(2 * ours.cpu_us / (before.cpu_us + after.cpu_us))
        told.add("service", ours)
        told.add("nginx", before)
        told.add("nginx", after)
        if name == "10k":
            cached.append(ours.rate / sides.ask("nginx_caching", name, seconds).rate)
            differing.append(sides.ask("service", name, seconds, heads_differ=True).rate / floor)
    yield Figure.at_least(
        f"blob_get.{name}",
        statistics.median(ratios),
        "of nginx's requests/s",
        bar,
        rounds=rounds,
        ratios=_rounded(ratios),
        **told.shown(),
        nginx=sides.nginx_version,
    )
    yield Figure.told(
        f"blob_get.{name}.cpu", statistics.median(cpu_ratios), "of nginx's CPU", ratios=_rounded(cpu_ratios)
    )
    if name == "10k":
        unit = "of nginx's requests/s"
        yield Figure.told(
            "blob_get.10k.nginx_keeps_files_open", statistics.median(cached), unit, ratios=_rounded(cached)
        )
        yield Figure.told("blob_get.10k.heads_differ", statistics.median(differing), unit, ratios=_rounded(differing))


def _mixed(sides: _Sides, rounds: int, seconds: float) -> Figure:
    """Small hits beside large streams: one must not wait for the other."""
    ratios = []
    latencies: dict[str, list[float]] = {"service": [], "nginx": []}
    streams: dict[str, list[float]] = {"service": [], "nginx": []}
    for number in range(rounds):
        print(f"  mixed: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        floor = []
        for server in ("nginx", "service", "nginx"):
            small, large = sides.ask_both(server, seconds)
            latencies[server].append(small.p99_ms)
            streams[server].append(large.bytes / large.seconds / 1e6)
            if server == "nginx":
                floor.append(small.p99_ms)
        ratios.append(latencies["service"][-1] / statistics.mean(floor))
    return Figure.at_most(
        "blob_get.mixed_p99",
        statistics.median(ratios),
        "of nginx's p99",
        1.0,
        rounds=rounds,
        ratios=_rounded(ratios),
        p99_ms={server: round(statistics.median(values), 2) for server, values in latencies.items()},
        streams_mb_per_s={server: round(statistics.median(values)) for server, values in streams.items()},
    )


class _Told:
    """Medians by server."""

    def __init__(self) -> None:
        self._got: dict[str, list[_Got]] = {}

    def add(self, server: str, got: _Got) -> None:
        self._got.setdefault(server, []).append(got)

    def shown(self) -> dict[str, Any]:
        return {
            f"{server}_{what}": round(statistics.median(values), 2)
            for server, got in self._got.items()
            for what, values in {
                "per_s": [each.rate for each in got],
                "cpu_us": [each.cpu_us for each in got],
                "p50_ms": [each.load.p50_ms for each in got],
                "p99_ms": [each.load.p99_ms for each in got],
            }.items()
        }


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in sorted(values)]
