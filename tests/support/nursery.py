"""Processes to be killed: forked in milliseconds from one that has imported everything, and watched through a file.

    with Nursery(folder, "drills._kill_jobs") as nursery:
        victim = nursery.start("put", {Slot.DIE_IN: 2, Slot.DIE_AT: 7}, root=str(root))  # its second put, seventh call
        victim.wait_ready()
        victim.kill()  # now, if it did not die before
        victim.reap()

Each victim shares a `Page` of numbers with the drill, which outlives it: how many operations it began and finished, and
how many calls of the operating system (and statements of SQLite) that change something it made in the one under way.
The calls are counted in Python, where all of this project's are made, so a victim can be told to die at any of them:
between any two steps of an operation, and in the middle of a write. What it has been acknowledged it appends to a file,
by a call that is not counted.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import importlib
import itertools
import json
import mmap
import os
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, Self

_READY_SECONDS: Final = 30.0

CALLS: Final = (
    *("open", "write", "pwrite", "fsync", "ftruncate", "link", "rename", "replace", "unlink", "mkdir", "utime"),
    *("flock", "sql"),
)
"""What is counted. Of `open` only what may make a file."""


class Slot(enum.IntEnum):
    """The numbers of a page."""

    READY = 0
    BEGUN = 1
    """Operations begun; one is under way while this is more than DONE."""
    DONE = 2
    CALLS = 3
    """Calls in the operation under way, or since the start where a victim's operations are not marked."""
    MOST_CALLS = 4
    """Of one finished operation."""
    ALL_CALLS = 5
    """Of all finished operations together."""
    DIE_IN = 6
    """The first operation to die in."""
    DIE_AT = 7
    """The call to die at, counted from 1; 0 for none."""
    TORN = 8
    """Where that call is a write, half of it is written first."""
    DIED_AT = 9
    """1 + the index in CALLS of the call that it died at; 0 where it was killed from outside."""


class Page:
    """Numbers in a mapped file, shared by a victim and the drill."""

    def __init__(self, path: Path) -> None:
        with path.open("ab+") as file:
            file.truncate(8 * len(Slot))
            self._map = mmap.mmap(file.fileno(), 8 * len(Slot))
        self._numbers = memoryview(self._map).cast("q")

    def __getitem__(self, slot: Slot) -> int:
        return self._numbers[slot]

    def __setitem__(self, slot: Slot, value: int) -> None:
        self._numbers[slot] = value

    def close(self) -> None:
        self._numbers.release()
        self._map.close()


class Steps:
    """The victim's side: counts its calls, and dies when it is told to."""

    def __init__(self, page: Page, acknowledged: Path) -> None:
        self._page = page
        self._lock = threading.Lock()  # guards the counting
        self._log = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._write = os.write

    def install(self) -> None:
        """Counts calls from now on."""
        for name in CALLS:
            if hasattr(os, name):
                setattr(os, name, self._counted(name, getattr(os, name)))
        fcntl.flock = self._counted("flock", fcntl.flock)
        connect = sqlite3.connect

        def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **options)
            connection.set_trace_callback(lambda _: self._step("sql"))
            return connection

        sqlite3.connect = connected  # type: ignore[assignment]

    def ready(self) -> None:
        """Operations begin now."""
        self._page[Slot.READY] = 1

    def always(self) -> None:
        """All that follows is one operation."""
        self._page[Slot.BEGUN] = 1
        self.ready()

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """One operation; calls are counted in it only."""
        page = self._page
        page[Slot.CALLS] = 0
        page[Slot.BEGUN] += 1
        yield
        page[Slot.DONE] += 1
        page[Slot.ALL_CALLS] += page[Slot.CALLS]
        page[Slot.MOST_CALLS] = max(page[Slot.MOST_CALLS], page[Slot.CALLS])

    def acknowledge(self, words: str) -> None:
        """Notes for the drill what was reported as done."""
        self._write(self._log, words.encode() + b"\n")

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return call(*arguments, **options)
            half = (lambda: call(arguments[0], arguments[1][: len(arguments[1]) // 2])) if name == "write" else None
            self._step(name, half)
            return call(*arguments, **options)

        return counted

    def _step(self, name: str, half: Callable[[], Any] | None = None) -> None:
        page = self._page
        if page[Slot.BEGUN] <= page[Slot.DONE]:
            return
        with self._lock:
            page[Slot.CALLS] += 1
            if not 0 < page[Slot.DIE_AT] <= page[Slot.CALLS] or page[Slot.BEGUN] < page[Slot.DIE_IN]:
                return
            page[Slot.DIED_AT] = 1 + CALLS.index(name)
            if half is not None and page[Slot.TORN]:
                half()
            os.kill(os.getpid(), signal.SIGKILL)


Job = Callable[..., None]
"""What a victim does: called with its `Steps` and the arguments of `Nursery.start`."""


class Victim:
    """A process of the nursery, and what is left of it."""

    def __init__(self, nursery: Nursery, pid: int, page: Page, acknowledged: Path) -> None:
        self.pid = pid
        self.page = page
        self._nursery = nursery
        self._acknowledged = acknowledged
        self._descriptor = os.pidfd_open(pid)
        self._ended = False

    def wait_ready(self, seconds: float = _READY_SECONDS) -> None:
        """Returns when its operations begin.

        Raises:
            RuntimeError: it ended before, or did not come so far.
        """
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        for _ in range(int(seconds * 1000)):
            if self.page[Slot.READY] or poller.poll(1):
                break
        if not self.page[Slot.READY]:
            raise RuntimeError(f"a victim did not begin: {self._nursery.last_words()}")

    def wait_dead(self, seconds: float) -> bool:
        """Whether it ended within this time."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(int(seconds * 1000)))

    def kill(self) -> None:
        """SIGKILL; harmless where it has ended."""
        if not self._ended:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def reap(self) -> None:
        """Takes leave of a victim that was killed.

        Raises:
            RuntimeError: it ended by itself, so what it did has failed; with its last words.
        """
        if self._ended:
            return
        self._ended = True
        os.close(self._descriptor)
        code = self._nursery.reap(self.pid)
        if code != -signal.SIGKILL:
            raise RuntimeError(f"a victim ended by itself ({code}): {self._nursery.last_words()}")

    def acknowledged(self) -> list[str]:
        """What it noted as done, line by line; one that was cut is left out."""
        with contextlib.suppress(FileNotFoundError):
            return [line[:-1] for line in self._acknowledged.read_text().splitlines(True) if line.endswith("\n")]
        return []


class Nursery:
    """Starts victims.

    Args:
        folder: for pages, acknowledgements and the log.
        jobs: a module whose functions are what a victim can do.
    """

    def __init__(self, folder: Path, jobs: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._log = folder / "nursery.log"
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards the talk with the nursery
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.nursery", jobs],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                cwd=folder,
            )

    def start(self, job: str, slots: Mapping[Slot, int] | None = None, **arguments: Any) -> Victim:
        """A new victim, doing `job` with these arguments, which are plain JSON values.

        Args:
            slots: what its page says from the start.
        """
        number = next(self._numbers)
        page_path, acknowledged = self._folder / f"{number}.page", self._folder / f"{number}.acknowledged"
        page = Page(page_path)
        for slot, value in (slots or {}).items():
            page[slot] = value
        asked = {"job": job, "page": str(page_path), "acknowledged": str(acknowledged), "arguments": arguments}
        return Victim(self, self._ask(asked), page, acknowledged)

    def reap(self, pid: int) -> int:
        """Waits for the end of a victim; gives its exit code, negative for a signal."""
        return self._ask({"reap": pid})

    def last_words(self) -> str:
        """The end of what victims wrote to standard error."""
        return self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Ends the nursery, and all that still lives in it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, what: Mapping[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery ended: {self.last_words()}")
        return int(answer)


def _main(module: str) -> None:
    jobs = importlib.import_module(module)
    living: set[int] = set()
    for line in sys.stdin:
        asked = json.loads(line)
        if "reap" in asked:
            pid = asked["reap"]
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            living.discard(pid)
            continue
        pid = os.fork()
        if pid == 0:
            _run(getattr(jobs, asked["job"]), asked)
        living.add(pid)
        print(pid, flush=True)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _run(job: Job, asked: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        steps = Steps(Page(Path(asked["page"])), Path(asked["acknowledged"]))
        steps.install()
        job(steps, **asked["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[1])
