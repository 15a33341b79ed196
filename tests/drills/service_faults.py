"""A service that is dead, hung, slow, strange or dying: what a job pays, and whether it finds the service again.

Method. A real service process holds entries that other machines put there. Between it and a node stands a proxy that
breaks one thing at a time, or something else listens at its address. Per fault and round, a new node with disk tier,
breaker and spool asks for programs that nobody has: the first, then many, and every answer is compared byte by byte
with what the compiler makes. What a look-up adds is its time less that of a node with the same tiers and a remote in
memory, which is asked in turns with it. Then the fault ends, nobody touches the node, and the drill waits for the
breaker to close, for a hit from the remote, and for the uploads that the fault held up.

Held: nothing lost, nothing wrong; a fault is counted as a failure and never as a miss; a dead or black-holed service
costs one connect budget (50 ms), a hung one its answer budget (2 s), once, and later look-ups next to nothing; a
service that answers, but slowly, costs a job no more than 2 s and a tenth of what its compiles cost (`gate.py`), and
its hits are still used. A service is also killed again and again under traffic; in the full form one is away for a
minute, too, and the command line compiles with the real XLA under three of the faults.

Excluded: networks between machines (only loopback is spoken to yet), TLS. The compiler of the nodes takes no time, and
says that it took a second.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from drills._service_scenarios import FIRST_MS, SCENARIOS, SEED, Scenario
from support.clean import clean_folder
from support.faultproxy import Fault, FaultProxy
from support.figures import Figure, Size
from support.rig import Rig, median_or_nan, private, program, rigged
from support.served import Served
from support.service import running_service, start_service
from torchtpu_cache.counters import Tier
from torchtpu_cache.gate import CREDIT_SECONDS, SHARE
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.stores.memory import MemoryStore

SERVED_SECONDS: Final = 35.0
"""The longest pause between two probes is 30 s."""

UPLOADED_SECONDS: Final = 100.0
"""The longest pause between two tries of the spool is 60 s, with its jitter 90 s."""

KNOWN: Final = 64
COMPILE_SECONDS: Final = 1.0
"""What the nodes' compiler says that it took."""

CORPUS: Final = Path(__file__).parents[1] / "data" / "corpus"


@dataclass(slots=True)
class Outcome:
    """What all nodes of the campaign came to. Thread-safe."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: int = 0
    lost: int = 0
    wrong: int = 0
    faults: int = 0
    taken_for_misses: int = 0
    uncounted: list[str] = field(default_factory=list)

    def add(self, rig: Rig) -> None:
        """The end of a node."""
        with self.lock:
            self.answers += rig.answers
            self.lost += rig.lost
            self.wrong += rig.wrong

    def add_fault(self, name: str, rig: Rig) -> None:
        """The end of a fault under which no honest miss can have been heard."""
        totals = rig.totals()
        with self.lock:
            self.faults += 1
            self.taken_for_misses += totals["tier_misses"].get("remote", 0)
            if not any(failure.startswith("remote.") for failure in totals["failures"]):
                self.uncounted.append(name)

    def figures(self) -> Iterator[Figure]:
        yield Figure.none_of("service_faults.lost_compiles", self.lost, self.answers)
        yield Figure.none_of("service_faults.wrong_bytes", self.wrong, self.answers)
        yield Figure.none_of("service_faults.faults_taken_for_misses", self.taken_for_misses, self.faults)
        yield Figure.none_of(
            "service_faults.faults_not_counted", len(self.uncounted), self.faults, names=self.uncounted
        )


@dataclass(frozen=True, slots=True)
class Ground:
    """Where the campaign takes place."""

    service: Served
    folder: Path
    outcome: Outcome
    size: Size


def run(size: Size) -> Iterator[Figure]:
    with clean_folder(in_memory=True) as folder, running_service(folder / "data") as service:
        ground = Ground(service, folder, Outcome(), size)
        _publish_known(ground)
        recoveries = [] if size is Size.SHORT else [_away_for_a_minute(ground)]
        for scenario in SCENARIOS:
            if size is Size.FULL or not scenario.full_only:
                recovery = Recovery(scenario.name, ground)
                yield from _suffer(scenario, ground, recovery)
                recoveries.append(recovery)
        for milliseconds in (300,) if size is Size.SHORT else (50, 200, 500, 1500):
            yield from _slow(ground, milliseconds / 1000)
        yield from _dying(ground)
        for recovery in recoveries:
            yield from recovery.figures()
        if size is Size.FULL:
            yield from _command_line(ground)
        yield from ground.outcome.figures()


def known(number: int) -> str:
    """The name of a program that the service has."""
    return f"known {number}"


def _publish_known(ground: Ground) -> None:
    with rigged(private(ground.folder / "other"), ground.service.url) as other:
        for number in range(KNOWN):
            other.ask(program(known(number)))
        assert other.node.drain(30.0) == 0
        ground.outcome.add(other)


# ---- one fault after another -----------------------------------------------------------------------------------------


def _suffer(scenario: Scenario, ground: Ground, recovery: Recovery) -> Iterator[Figure]:
    """Rounds under one fault; each round's node then recovers, untouched, beside what follows."""
    firsts: list[float] = []
    laters: list[float] = []
    failures: Counter[str] = Counter()
    for number in range(ground.size.of(1, 5)):
        name = f"{scenario.name}-{number}"
        asked = [known(i) if scenario.asks_known else f"{name} {i}" for i in range(ground.size.of(20, 60))]
        with ExitStack() as stack:
            quiet = stack.enter_context(_quiet(ground, f"{name}-quiet"))
            proxy = stack.enter_context(FaultProxy(ground.service.port))
            rig = stack.enter_context(rigged(private(ground.folder / name), proxy.url))
            with scenario.breaks(proxy):
                # In turns, so that other work on the machine meets both.
                pairs = [(rig.ask(program(each))[0], quiet.ask(program(each))[0]) for each in asked]
                ground.outcome.add_fault(scenario.name, rig)
                failures.update(rig.totals()["failures"])
            recovery.watch(rig, asked, stack.pop_all())
        firsts.append(pairs[0][0] - median_or_nan(plain for _, plain in pairs))
        laters += [taken - plain for taken, plain in pairs[1:]]
    laters.sort()
    name = f"service_faults.{scenario.name}"
    # One round beside the rest of `make test` proves that nothing waits for long, and no more.
    slack = ground.size.of(5, 1)
    more = {"worst": round(max(firsts), 2), "rounds": len(firsts), "failures": dict(failures)}
    bar_ms = scenario.waits_ms + slack * FIRST_MS
    yield Figure.at_most(f"{name}.first_adds", median_or_nan(firsts), "ms", bar_ms, **more)
    spread = {"p99": round(laters[int(len(laters) * 0.99)], 2), "of": len(laters)}
    yield Figure.at_most(f"{name}.later_adds", median_or_nan(laters), "ms", slack * scenario.later_ms, **spread)


@contextmanager
def _quiet(ground: Ground, name: str) -> Iterator[Rig]:
    """A node with the same tiers, whose remote costs nothing."""
    with rigged(private(ground.folder / name), MemoryStore(limit_bytes=1 << 26)) as rig:
        yield rig
        ground.outcome.add(rig)


class Recovery:
    """Nodes whose fault has ended, each watched by a thread until the remote serves it and takes from it again."""

    def __init__(self, name: str, ground: Ground) -> None:
        self._name = name
        self._ground = ground
        self._threads: list[threading.Thread] = []
        self._served: list[float] = []
        self._uploaded: list[float] = []
        self._errors: list[str] = []

    def start(self, work: Callable[[], None]) -> None:
        """Runs `work` in a thread; what it raises is told with the figures."""

        def watched() -> None:
            try:
                work()
            except Exception as error:
                self._errors.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=watched, daemon=True)
        thread.start()
        self._threads.append(thread)

    def watch(self, rig: Rig, spooled: list[str], stack: ExitStack) -> None:
        """Watches from now on, and closes `stack` at the end."""
        ended = time.monotonic()

        def work() -> None:
            with stack:
                self.wait(rig, spooled, ended)

        self.start(work)

    def wait(self, rig: Rig, spooled: list[str], ended: float) -> None:
        """Returns once `rig` is served by the remote, and what it spooled is there."""
        assert rig.breaker is not None
        _until(lambda: not rig.breaker.status.open, ended + SERVED_SECONDS, "the breaker did not close")  # type: ignore[union-attr]
        # Asked last, so that it is not on this node's disk.
        assert rig.ask(program(known(KNOWN - 1)))[1] is Tier.REMOTE, "no hit came from the remote"
        self._served.append(time.monotonic() - ended)
        with RemoteStore(self._ground.service.url, DEFAULT_NAMESPACE, connect_seconds=2.0, answer_seconds=10.0) as look:
            keys = {program(name).key for name in spooled}
            _until(lambda: len(look.lookup(list(keys))) == len(keys), ended + UPLOADED_SECONDS, "uploads are missing")
        self._uploaded.append(time.monotonic() - ended)
        self._ground.outcome.add(rig)

    def figures(self) -> Iterator[Figure]:
        """Waits for all of them; the slowest counts."""
        for thread in self._threads:
            thread.join(SERVED_SECONDS + UPLOADED_SECONDS + 90)
        name, rounds = f"service_faults.{self._name}", len(self._threads)
        more: dict[str, object] = {"rounds": rounds} | ({"errors": self._errors[:3]} if self._errors else {})
        for what, found, bar in (
            ("served_again", self._served, SERVED_SECONDS),
            ("uploads_arrived", self._uploaded, UPLOADED_SECONDS),
        ):
            yield Figure.at_most(
                f"{name}.{what}", max(found) if len(found) == rounds else float("nan"), "s", bar, **more
            )


def _until(condition: Callable[[], bool], deadline: float, otherwise: str) -> None:
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.05)


def _away_for_a_minute(ground: Ground) -> Recovery:
    """A service that is away for so long that probe and spool have come to their longest pauses."""
    recovery = Recovery("dead_for_a_minute", ground)

    def work() -> None:
        with FaultProxy(ground.service.port) as proxy, rigged(private(ground.folder / "away"), proxy.url) as rig:
            proxy.refuse()
            asked = [f"away {i}" for i in range(10)]
            for each in asked:
                rig.ask(program(each))
            ground.outcome.add_fault("dead_for_a_minute", rig)
            time.sleep(60)
            proxy.listen()
            recovery.wait(rig, asked, time.monotonic())

    recovery.start(work)
    return recovery


# ---- slow ------------------------------------------------------------------------------------------------------------


def _slow(ground: Ground, late_seconds: float) -> Iterator[Figure]:
    """A service whose every answer is late and whose answers are right: what misses cost, and that hits come."""
    name = f"service_faults.late_by_{late_seconds * 1000:.0f}ms"
    count = ground.size.of(10, 100)
    with (
        _quiet(ground, f"{name}-quiet") as quiet,
        FaultProxy(ground.service.port) as proxy,
        rigged(private(ground.folder / name), proxy.url) as rig,
    ):
        proxy.fault = Fault(delay_seconds=late_seconds)
        asked = [program(f"{name} {i}") for i in range(count)]
        added = sum(rig.ask(each)[0] - quiet.ask(each)[0] for each in asked) / 1000
        totals = rig.totals()
        # The last that is asked may overdraw.
        most = CREDIT_SECONDS + SHARE * totals["compile_seconds"] + late_seconds + 0.1
        more = {"programs": count, "asked": totals["tier_misses"]["remote"], "skipped": totals["skipped"]}
        yield Figure.at_most(f"{name}.misses_add", added, "s", round(most, 2), **more)
        # Each compile gives the remote credit again, and so does each hit that comes sooner than a compile.
        tiers = Counter(str(rig.ask(program(known(i)))[1]) for i in range(ground.size.of(4, 30)))
        bar = 1 if late_seconds < COMPILE_SECONDS else 0
        yield Figure.at_least(f"{name}.hits", tiers[Tier.REMOTE], "count", bar, tiers=dict(tiers))
        proxy.fault = None
        ground.outcome.add(rig)


# ---- dying under traffic ---------------------------------------------------------------------------------------------


def _dying(ground: Ground) -> Iterator[Figure]:
    """Kills a service and starts it again while nodes ask; every answer is right, and hits come after each start."""
    source = random.Random(SEED)
    kills, served = ground.size.of(2, 20), []
    data = ground.folder / "mortal"
    service = start_service(data)
    nodes = [Rig(private(ground.folder / f"mortal-{i}"), service.url) for i in range(2)]
    stop = threading.Event()
    threads = [threading.Thread(target=_traffic, args=(node, i, stop)) for i, node in enumerate(nodes)]
    try:
        for thread in threads:
            thread.start()
        for number in range(kills):
            stop.wait(source.uniform(0.2, 0.8))
            service.kill()
            stop.wait(source.uniform(0.0, 0.4))
            service = start_service(data, listen=f"127.0.0.1:{service.port}")
            served.append(_found_again(ground, nodes, f"after kill {number}", service))
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
        for node in nodes:
            node.close()
            ground.outcome.add(node)
        service.kill()
    answers, wrong = sum(node.answers for node in nodes), sum(node.lost + node.wrong for node in nodes)
    yield Figure.none_of("service_faults.dying.wrong_or_lost", wrong, answers, kills=kills, seed=SEED)
    yield Figure.at_most("service_faults.dying.served_again", max(served), "s", SERVED_SECONDS, kills=kills)


def _traffic(node: Rig, number: int, stop: threading.Event) -> None:
    count = 0
    while not stop.wait(0.005):
        node.ask(program(f"mortal {number if count % 2 else 'both'} {count}"))
        count += 1


def _found_again(ground: Ground, nodes: list[Rig], name: str, service: Served) -> float:
    """Seconds until every node is served by the service that has just started."""
    started = time.monotonic()
    with rigged(private(ground.folder / name.replace(" ", "-")), service.url) as other:
        for i in range(len(nodes)):
            other.ask(program(f"{name} {i}"))
        assert other.node.drain(30.0) == 0
        ground.outcome.add(other)
    for i, node in enumerate(nodes):
        breaker = node.breaker
        assert breaker is not None
        _until(lambda: not breaker.status.open, started + SERVED_SECONDS, "a breaker did not close")  # noqa: B023
        assert node.ask(program(f"{name} {i}"))[1] is Tier.REMOTE, "no hit came from the remote"
    return time.monotonic() - started


# ---- the command line, with the real XLA -----------------------------------------------------------------------------


def _command_line(ground: Ground) -> Iterator[Figure]:
    """One real compile per fault, against the same without a remote."""
    plain = min(_compile(ground, f"plain-{i}", None)[0] for i in range(3))
    for scenario in SCENARIOS:
        if scenario.name not in ("dead", "hung", "random_bytes"):
            continue
        with FaultProxy(ground.service.port) as proxy, scenario.breaks(proxy):
            seconds, answered = min(_compile(ground, f"{scenario.name}-cli-{i}", proxy.url) for i in range(3))
        # At its end a command waits for what is still in the spool, two seconds where nothing goes.
        # The last two for the noise of starting processes, which grows with what else the machine does.
        bar = scenario.waits_ms + FIRST_MS + 2000 + 500 + 500 * plain
        name = f"service_faults.{scenario.name}.command_adds"
        yield Figure.at_most(name, (seconds - plain) * 1000, "ms", bar, plain_seconds=round(plain, 2))
        yield Figure.at_least(f"service_faults.{scenario.name}.command_compiles", answered, "count", 1)


def _compile(ground: Ground, name: str, url: str | None) -> tuple[float, int]:
    """Seconds of `torchtpu-cache compile`, and how many executables it gave."""
    command = [sys.executable, "-m", "torchtpu_cache.cli.main", "compile", str(CORPUS / "jax_add.mlirbc"), "--json"]
    command += ["--cache-dir", str(ground.folder / f"cli-{name}"), "--out", str(ground.folder / f"out-{name}")]
    started = time.monotonic()
    answer = subprocess.run(
        [*command, *(["--remote", url] if url else [])], capture_output=True, text=True, check=False, timeout=120
    )
    seconds = time.monotonic() - started
    lines = [json.loads(line) for line in answer.stdout.splitlines()]
    written = list((ground.folder / f"out-{name}").glob("*.pjrt"))
    return seconds, int(answer.returncode == 0 and len(lines) == len(written) == 1)
