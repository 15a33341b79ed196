"""Hostile HTTP against a real service process: no 500, no hang, no crash, nothing left behind, nobody else harmed.

Method. Three attackers, one after another, on a service in a process of its own:

- schemathesis reads the service's own OpenAPI document and tries, per operation, what the document allows and what it
  forbids, and sequences of calls. Every answer is held to the document: status, headers, media type, schema.
- A fuzzer at the level of the socket (`support/httpfuzzer.py`) sends request lines, targets, headers, digests, lengths,
  chunks, trailers and pipelines that are wrong in one way or many, cut, split, mutated, half-closed or reset, from
  several threads. What comes back must be HTTP, every error a problem document, every entry the one its ETag names.
  A third of the connections send plain requests, each of which is owed its answer.
- Peers that dawdle: heads and uploads of a byte now and then, readers that take nothing.

Beside the second and third a client of good faith reads an entry again and again, and its latency is told. In the end
the service must be alive, its memory, descriptors and threads as before, no temporary file left, every entry sound, and
a put and a get must work. Seeds are fixed in the short form, and printed with every finding.

Excluded: TLS, peers of another user, more connections than descriptors (tests/integration/server has those).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from support.clean import clean_folder
from support.figures import Figure, Size
from support.httpfuzzer import Case, Fuzzer
from support.httptalk import converse
from support.served import Served, launch, path_of
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.store import PutStatus
from torchtpu_cache_core.testing.entries import entry_for

SEED: Final = 20261130
THREADS: Final = 16
HONEST_P99_MS: Final = 1000.0
"""Of a service in one Python process, while sixteen threads of another do their worst on the same two cores."""
SETTLE_SECONDS: Final = 60.0
"""A connection on which nothing happens is closed after 30 s."""

GROWN_BYTES: Final = 64 << 20
STANDING: Final = 6


def run(size: Size) -> Iterator[Figure]:
    with clean_folder() as folder, ExitStack() as stack:
        log = folder / "service.log"
        served = launch(folder / "data", log=log)
        stack.callback(served.kill)
        standing = [entry_for(f"standing {i}", size_bytes=1000 * 4**i) for i in range(STANDING)]
        for entry in standing:
            assert served.put(entry).status == 201
        _warm(served, standing)
        before = _state(served)
        yield from _schemathesis(served, folder, size)
        yield from _fuzz(served, standing, size)
        yield from _dawdle(served, standing[3], size)
        yield from _afterwards(served, standing, before)
        logged = log.read_text()
        print(logged[-3000:], file=sys.stderr)
        yield Figure.at_most("http_fuzz.after.tracebacks_logged", logged.count("Traceback"), "count", 0)


def _warm(served: Served, standing: list[Entry]) -> None:
    """Buffers and threads that a service has once it has worked are no leak."""
    fuzzer = Fuzzer(1, standing)
    for _ in range(100):
        case = fuzzer.case()
        if case.plain:
            converse(served.port, case)


# ---- the document ----------------------------------------------------------------------------------------------------


def _schemathesis(served: Served, folder: Path, size: Size) -> Iterator[Figure]:
    report = folder / "report.json"
    settings = folder / "schemathesis.toml"
    # No schema can say that a body is a valid entry of its key, so a put that fits the document may be refused.
    settings.write_text(
        '[[operations]]\ninclude-name = "PUT /v1/{namespace}/entries/{key}"\n'
        "checks.positive_data_acceptance.enabled = false\n"
    )
    # By count in the short form, so that a slow machine tries as much as a quick one.
    bounds = ["--max-examples", "10"] if size is Size.SHORT else ["--max-examples", "2000", "--max-time", "300"]
    phases = "coverage,fuzzing" if size is Size.SHORT else "coverage,fuzzing,stateful"
    seed = SEED if size is Size.SHORT else random.randrange(1 << 32)
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(settings), "run"]
    command += [f"http://127.0.0.1:{served.port}/openapi.json", "--no-color", "--request-timeout", "10"]
    command += [*bounds, "--seed", str(seed), "--phases", phases]
    command += ["--report", "json", "--report-json-path", str(report)]
    environ = os.environ | {"SCHEMATHESIS_HOOKS": "support.openapi_hooks", "PYTHONPATH": str(Path(__file__).parents[1])}
    answer = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=size.of(120, 400)
    )
    if not report.exists():
        raise RuntimeError(f"schemathesis gave no report: {answer.stdout[-1000:]} {answer.stderr[-1000:]}")
    found = json.loads(report.read_text())
    tried, failures = found["test_cases"]["generated"], found["failures"]
    more = {"seed": seed, "operations": found["operations"]["tested"]}
    told = [f"{each['code']} {each['title']}: {each['operations']}" for each in failures] + [
        str(e) for e in found["errors"]
    ]
    if told:
        print(answer.stdout[-6000:], file=sys.stderr)
    yield Figure.none_of("http_fuzz.document.violations", len(told), tried, findings=told[:5], **more)


# ---- the socket ------------------------------------------------------------------------------------------------------


class _Honest:
    """A client of good faith that reads `entry` every 20 ms, on fresh connections and kept ones in turns."""

    def __init__(self, served: Served, entry: Entry) -> None:
        self.milliseconds: list[float] = []
        self.wrong = 0
        self._served = served
        self._entry = entry
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def __enter__(self) -> _Honest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        kept: http.client.HTTPConnection | None = None
        while not self._stop.wait(0.02):
            started = time.perf_counter()
            try:
                connection = kept or http.client.HTTPConnection(self._served.host, self._served.port, timeout=30)
                connection.request("GET", path_of(self._entry))
                body = connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                self.wrong += 1
                kept = None
                continue
            self.milliseconds.append((time.perf_counter() - started) * 1000)
            self.wrong += body != bytes(self._entry.buffer)
            kept = connection if kept is None else None
            if kept is None:
                connection.close()
        if kept is not None:
            kept.close()

    def figures(self, name: str, size: Size, **more: object) -> Iterator[Figure]:
        ordered = sorted(self.milliseconds)
        p99 = ordered[int(len(ordered) * 0.99)] if ordered else float("nan")
        median = ordered[len(ordered) // 2] if ordered else float("nan")
        yield Figure.none_of(f"{name}.honest_wrong", self.wrong, len(ordered) + self.wrong)
        yield Figure.at_most(
            f"{name}.honest_p99", p99, "ms", size.of(5, 1) * HONEST_P99_MS, median=round(median, 2), **more
        )


def _fuzz(served: Served, standing: list[Entry], size: Size) -> Iterator[Figure]:
    seconds = size.of(4, 600)
    first = SEED if size is Size.SHORT else random.randrange(1 << 32)
    ends = time.monotonic() + seconds
    statuses: Counter[int] = Counter()
    findings: list[str] = []
    cases = 0
    lock = threading.Lock()

    def attack(seed: int) -> None:
        nonlocal cases
        fuzzer = Fuzzer(seed, standing)
        while time.monotonic() < ends and len(findings) < 20:
            case = fuzzer.case()
            fault, heard = _played(served, case)
            with lock:
                cases += 1
                statuses.update(heard)
                if fault:
                    findings.append(f"seed {seed}: {fault} ({str(case)[:1000]})")

    threads = [threading.Thread(target=attack, args=(first + i,)) for i in range(THREADS)]
    with _Honest(served, standing[2]) as honest:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for finding in findings:
        print(finding, file=sys.stderr)
    shown = {str(status): count for status, count in sorted(statuses.items())}
    more = {"seed": first, "statuses": shown, "findings": [finding[:300] for finding in findings[:3]]}
    yield Figure.none_of("http_fuzz.socket.findings", len(findings), cases, **more)
    yield from honest.figures("http_fuzz.socket", size)


def _played(served: Served, case: Case) -> tuple[str, list[int]]:
    try:
        heard = converse(served.port, case)
    except OSError as error:
        return f"no connection could be made: {error}", []
    return heard.fault, heard.statuses


# ---- dawdling --------------------------------------------------------------------------------------------------------


def _dawdle(served: Served, entry: Entry, size: Size) -> Iterator[Figure]:
    """Slow heads, slow uploads and readers that take nothing, 32 of each."""
    head = f"GET {path_of(entry)} HTTP/1.1\r\nHost: localhost\r\nX-Slow: ".encode()
    late = entry_for("dawdled", size_bytes=1 << 20)
    upload = f"PUT {path_of(late)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {late.size_bytes}\r\n"
    upload += f"Content-Digest: sha-256=:{'A' * 43}=:\r\n\r\n"
    read = f"GET {path_of(entry)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 30
    with ExitStack() as stack, _Honest(served, entry) as honest:
        peers = []
        for opening in (head, upload.encode() + bytes(late.buffer[:5000]), read):
            for _ in range(32):
                peer = stack.enter_context(socket.create_connection((served.host, served.port), timeout=5))
                peer.sendall(opening)
                peers.append(peer)
        ends = time.monotonic() + size.of(1, 45)
        while time.monotonic() < ends:
            for peer in peers[:64]:
                with contextlib.suppress(OSError):
                    peer.send(b"a")
            time.sleep(0.2)
        still = sum(_is_open(peer) for peer in peers[:32])
    if size is Size.FULL:
        yield Figure.none_of("http_fuzz.dawdling.heads_held_over_30s", still, 32)
    yield from honest.figures("http_fuzz.dawdling", size, peers=len(peers))


def _is_open(peer: socket.socket) -> bool:
    peer.setblocking(False)
    try:
        while piece := peer.recv(1 << 16):
            if piece.startswith(b"HTTP/1.1 408"):
                return False
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


# ---- what is left ----------------------------------------------------------------------------------------------------


def _state(served: Served) -> dict[str, int]:
    process = Path(f"/proc/{served.process.pid}")
    return {
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "temporary_files": len(list(served.data_dir.rglob(".writing-*"))),
        "resident_bytes": served.resident_bytes()[0],
    }


def _afterwards(served: Served, standing: list[Entry], before: dict[str, int]) -> Iterator[Figure]:
    yield Figure.at_least("http_fuzz.after.alive", int(served.process.poll() is None), "count", 1)
    # The index keeps up to eight readers of three files each, and the pool its sixteen threads.
    bars = {"descriptors": 8 * 3 + 2, "threads": 16 + 2, "temporary_files": 0, "resident_bytes": GROWN_BYTES}
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        grown = {name: value - before[name] for name, value in _state(served).items()}
        if all(grown[name] <= bar for name, bar in bars.items()) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for name, bar in bars.items():
        unit = "bytes" if name == "resident_bytes" else "count"
        yield Figure.at_most(f"http_fuzz.after.{name}_more", grown[name], unit, bar, before=before[name])
    with RemoteStore(
        f"http://127.0.0.1:{served.port}", DEFAULT_NAMESPACE, connect_seconds=5.0, answer_seconds=30.0
    ) as store:
        for entry in standing:
            store.put(entry)  # a mutation may have deleted it
        unsound = sum(store.get(info.key) is None for info in list(store.iterate()))
        yield Figure.none_of("http_fuzz.after.unsound_entries", unsound, len(list(store.iterate())))
        fresh = entry_for("after the fuzzing", size_bytes=100_000)
        created = store.put(fresh).status is PutStatus.CREATED
        found = store.get(fresh.key)
        works = created and found is not None and found.entry.digest == fresh.digest
    yield Figure.at_least("http_fuzz.after.put_and_get_work", int(works), "count", 1)
    metrics = served.ask("GET", "/metrics").body.decode()
    failed = sum(float(n) for n in re.findall(r'_requests_total\{[^}]*status="5[0-9]{2}"\} ([0-9.e+]+)', metrics))
    asked = sum(float(n) for n in re.findall(r"_requests_total\{[^}]*\} ([0-9.e+]+)", metrics))
    yield Figure.none_of("http_fuzz.after.requests_failed", int(failed), int(asked))
