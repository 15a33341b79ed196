"""A generated fleet: which programs its jobs ask for, and when. Input of the eviction benchmark.

Nobody has published such a trace, so this one is made up, from what is measured where that is possible:

- **Sizes and seconds of programs.** `_MEASURED` holds real compiles for a TPU v5e: bytes of the executable, seconds,
  and how far the entry format compresses it. In between, and down to the operations of eager mode (about a
  millisecond), they are interpolated on logarithmic scales. A part of a program keeps its size across code changes and
  libtpu releases, within a tenth.
- **Spread.** The measured programs are alike in kind and run on four chips; people report half an hour for programs of
  this size. So the seconds of a job's programs are multiplied by a log-normal factor of their job (`_JOB_SPREAD`: one
  job in forty takes five times as long, or a fifth) and one of their own (`_PROGRAM_SPREAD`), up to half an hour.
- **Jobs.** Training (restarted every few hours to days, code changes now and then), serving (tens of shape buckets,
  restarts all day, a part of them changed each week), sweeps over shapes (each a program that runs once or a few
  times), people at work (a run every few minutes by day, most with a program that never comes back), and daily or
  weekly batches. All of them use some of the same small operations. The numbers stand with each kind of job.
- **libtpu.** Every two weeks there is a new one, which each job takes up some days later; its programs are new then,
  and nobody asks for the old ones again.

A start asks for its programs one by one, a second apart, and once for each, however many hosts it has: whether the
first must compile decides for all. Same arguments, same trace.
"""

from __future__ import annotations

import bisect
import enum
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.store import CHEAP_COMPILE_SECONDS

MINUTE: Final = 60.0
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
WEEK: Final = 7 * DAY

_MEASURED: Final = (
    # executable MB, compile seconds, bytes of the executable per byte of the entry
    (0.005, 0.001, 3.0),  # an operation of eager mode; not measured on its own
    (0.070, 0.022, 5.0),  # the smallest module of torch_tpu; its ratio is taken from the next
    (1.35, 0.5, 7.5),  # torch_llama2_fwd
    (3.07, 1.2, 8.5),  # four blocks of torch_tpu, forward; ratio in between
    (7.5, 3.2, 9.7),  # torch_resnet18_fwd
    (27.0, 16.0, 12.9),  # jax_tfm6_adamw_step
    (46.6, 39.0, 15.6),  # jax_tfm12_adamw_step
    (92.0, 115.0, 15.3),  # jax_tfm24_adamw_step
    (100.0, 120.0, 15.0),
)
_JOB_SPREAD: Final = 0.8
_PROGRAM_SPREAD: Final = 0.3
_MOST_SECONDS: Final = 1800.0
_PLAIN_SECONDS_PER_BYTE: Final = 1e-5
_HEADER_BYTES: Final = 1200
_SHARED: Final = 300
_BETWEEN_SECONDS: Final = 1.0
_HERE: Final = 0.5
_SAME_MACHINE: Final = 0.35
_FRESH_HOSTS: Final = 0.5


class Variant(enum.Enum):
    """FLEET is the whole. MEASURED has no spread: seconds are what the sizes tell. PLAIN lets every byte cost the same
    and has no people at work, so that neither cost nor one-offs can favour a policy."""

    FLEET = "fleet"
    MEASURED = "measured"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Program:
    number: int
    size_bytes: int
    """Of its entry."""
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class Request:
    seconds: float
    """Since the trace began."""
    program: Program


@dataclass(frozen=True, slots=True)
class _Part:
    """What stays the same of a program when its code or libtpu changes."""

    number: int
    megabytes: float
    factor: float


@dataclass(frozen=True, slots=True)
class _Start:
    seconds: float
    job: int
    libtpu: int
    parts: tuple[tuple[_Part, int], ...]
    """Each with the number of its code change."""


_Asked = tuple[float, list[tuple[_Part, int]]]
_Kind = Callable[[float, float], Iterator[_Asked]]
"""Gives a job's starts, for the factor on its compile seconds and the time it comes up."""


class Fleet:
    """The starts of all jobs of a fleet over some weeks.

    Args:
        scale: how many jobs, 1.0 for a mid-sized laboratory (about 130 jobs and 20 people).
    """

    def __init__(self, seed: int, *, weeks: int = 6, scale: float = 1.0, variant: Variant = Variant.FLEET) -> None:
        self._seed = seed
        self._variant = variant
        self._end = weeks * WEEK
        self._chance = random.Random(f"fleet {seed}")
        self._upgrades = [14 * DAY * n - self._chance.uniform(0, 7) * DAY for n in range(1, weeks // 2 + 2)]
        self._parts = 0
        self._jobs = 0
        self._programs: dict[tuple[int, int, int], Program] = {}
        self._shared = [self._part(0.005, 0.07, 1.0) for _ in range(_SHARED)]
        self._starts: list[_Start] = []
        kinds: list[tuple[_Kind, float]] = [
            (self._training, 60),
            (self._serving, 8),
            (self._sweep, 25),
            (self._batch, 15),
        ]
        if variant is not Variant.PLAIN:
            kinds.append((self._person, 20))
        for kind, count in kinds:
            for _ in range(max(1, round(count * scale))):
                self._add(kind)
        self._starts.sort(key=lambda start: start.seconds)

    def service(self) -> list[Request]:
        """What reaches the service: starts on hosts whose disks do not have the job's programs, and of those nothing
        that compiles so fast that it stays on its machine."""
        chance = random.Random(f"service {self._seed}")
        requests = self._requests(start for start in self._starts if chance.random() < _FRESH_HOSTS)
        return [request for request in requests if request.program.compile_seconds >= CHEAP_COMPILE_SECONDS]

    def machine(self, number: int) -> list[Request]:
        """What one machine of a shared pool asks its disk for: half of the jobs come by, a third of their starts."""
        chance = random.Random(f"machine {self._seed} {number}")
        here = {job for job in range(1, self._jobs + 1) if chance.random() < _HERE}
        return self._requests(start for start in self._starts if start.job in here and chance.random() < _SAME_MACHINE)

    def _requests(self, starts: Iterator[_Start]) -> list[Request]:
        requests = [
            Request(start.seconds + number * _BETWEEN_SECONDS, self._program(part, code, start.libtpu))
            for start in starts
            for number, (part, code) in enumerate(start.parts)
        ]
        return sorted(requests, key=lambda request: request.seconds)

    def _add(self, kind: _Kind) -> None:
        self._jobs += 1
        chance = self._chance
        factor = math.exp(chance.gauss(0, _JOB_SPREAD))
        lag = chance.uniform(0, 5) * DAY
        small = [(part, 0) for part in chance.sample(self._shared, 20)]
        for seconds, parts in kind(factor, chance.uniform(0, self._end)):
            if 0 <= seconds < self._end:
                libtpu = sum(upgrade + lag <= seconds for upgrade in self._upgrades)
                self._starts.append(_Start(seconds, self._jobs, libtpu, (*parts, *small)))

    # ---- jobs: when they start, and what each start asks for -----------------------------------------------------

    def _training(self, factor: float, begin: float) -> Iterator[_Asked]:
        chance, code = self._chance, 0
        step = self._part(4, 100, factor)
        evaluation = _Part(self._next_part(), step.megabytes / 3, factor)
        helpers = [(self._part(0.05, 3, factor), 0) for _ in range(10)]
        mean_gap, end = chance.uniform(6, 36) * HOUR, begin + chance.expovariate(1 / (5 * DAY))
        seconds = begin
        while seconds < min(end, self._end):
            yield seconds, [(step, code), (evaluation, code), *helpers]
            seconds += chance.expovariate(1 / mean_gap)
            code += chance.random() < 0.12

    def _serving(self, factor: float, begin: float) -> Iterator[_Asked]:
        chance = self._chance
        buckets = [self._part(1, 25, factor) for _ in range(chance.randrange(24, 104))]
        codes = [0] * len(buckets)
        begin *= 0.6
        seconds, deployed, end = begin, begin, begin + chance.expovariate(1 / (20 * DAY))
        while seconds < min(end, self._end):
            if seconds >= deployed + WEEK:
                deployed += WEEK
                for changed in chance.sample(range(len(buckets)), len(buckets) * 15 // 100):
                    codes[changed] += 1
            yield seconds, list(zip(buckets, codes, strict=True))
            seconds += chance.expovariate(1 / (10 * HOUR))

    def _sweep(self, factor: float, begin: float) -> Iterator[_Asked]:
        chance = self._chance
        largest = self._part(2, 50, factor)
        helpers = [(self._part(0.05, 3, factor), 0) for _ in range(10)]
        for _ in range(chance.randrange(8, 33)):
            step = _Part(self._next_part(), largest.megabytes * chance.uniform(0.5, 1), factor)
            seconds = begin + chance.uniform(0, 1.5) * DAY
            for _ in range(chance.choices((1, 2, 3), (0.5, 0.35, 0.15))[0]):
                yield seconds, [(step, 0), *helpers]
                seconds += chance.expovariate(1 / (10 * HOUR))

    def _person(self, factor: float, begin: float) -> Iterator[_Asked]:
        chance, code = self._chance, 0
        tried = self._part(1, 60, factor)
        helpers = [(self._part(0.05, 3, factor), 0) for _ in range(8)]
        for day in range(round(self._end / DAY)):
            if day % 7 >= 5 or chance.random() < 0.4:
                continue
            seconds = day * DAY + chance.uniform(9, 12) * HOUR
            for _ in range(chance.randrange(5, 25)):
                code += chance.random() < 0.7
                yield seconds, [(tried, code), *helpers]
                seconds += chance.uniform(5, 40) * MINUTE

    def _batch(self, factor: float, begin: float) -> Iterator[_Asked]:
        chance = self._chance
        parts = [(self._part(0.5, 60, factor), 0) for _ in range(chance.randrange(5, 40))]
        period = chance.choice((DAY, WEEK, WEEK))
        seconds = begin % period
        while seconds < self._end:
            yield seconds + chance.uniform(0, 2) * HOUR, parts
            seconds += period

    # ---- programs ------------------------------------------------------------------------------------------------

    def _next_part(self) -> int:
        self._parts += 1
        return self._parts

    def _part(self, least_megabytes: float, most_megabytes: float, factor: float) -> _Part:
        megabytes = math.exp(self._chance.uniform(math.log(least_megabytes), math.log(most_megabytes)))
        return _Part(self._next_part(), megabytes, factor)

    def _program(self, part: _Part, code: int, libtpu: int) -> Program:
        """The same whoever asks for it, and in whatever order."""
        name = part.number, code, libtpu
        if name not in self._programs:
            chance = random.Random(f"program {self._seed} {name}")
            own = random.Random(f"part {self._seed} {part.number}").gauss(0, _PROGRAM_SPREAD)
            seconds, ratio = _measured(part.megabytes)
            size_bytes = _HEADER_BYTES + int(part.megabytes * 1e6 / ratio * chance.uniform(0.9, 1.1))
            if self._variant is Variant.PLAIN:
                seconds = size_bytes * _PLAIN_SECONDS_PER_BYTE
            elif self._variant is Variant.FLEET:
                seconds = min(_MOST_SECONDS, seconds * part.factor * math.exp(own) * chance.uniform(0.9, 1.1))
            self._programs[name] = Program(len(self._programs), size_bytes, seconds)
        return self._programs[name]


def _measured(megabytes: float) -> tuple[float, float]:
    """Compile seconds and compression ratio of an executable of that size."""
    right = min(max(1, bisect.bisect(_MEASURED, (megabytes,))), len(_MEASURED) - 1)
    (size0, seconds0, ratio0), (size1, seconds1, ratio1) = _MEASURED[right - 1], _MEASURED[right]
    part = math.log(megabytes / size0) / math.log(size1 / size0)
    return math.exp(math.log(seconds0) * (1 - part) + math.log(seconds1) * part), ratio0 * (1 - part) + ratio1 * part
