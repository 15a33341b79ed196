"""The durable spool: entries that this machine compiled and the remote has not acknowledged yet.

One file per entry, `<folder>/<key>`, the entry's bytes as everywhere, published by rename. An entry leaves the spool
only when the remote has it, or has said that it never will take it. The spool survives the death of the job; it does
not survive an ephemeral disk. Several processes may drain one spool: an upload holds an flock on its file.

One folder per remote and namespace, so that a run with another remote does not send an entry where it was not meant.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import logging
import math
import os
import random
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from torchtpu_cache.counters import Counters, Tier
from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.entry import PREFIX, Entry, Frame
from torchtpu_cache_core.errors import BreakerOpen, FailureKind, InvalidName, StoreError, StoreFull
from torchtpu_cache_core.header import Header
from torchtpu_cache_core.names import Key, Namespace
from torchtpu_cache_core.regular import open_regular
from torchtpu_cache_core.store import CHEAP_COMPILE_SECONDS, Store
from torchtpu_cache_core.stores.failures import has_no_locks
from torchtpu_cache_core.stores.files import FILES
from torchtpu_cache_core.stores.reading import OpenFile, read_bare_entry

_log = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS: Final = 1.0
_LONGEST_RETRY_SECONDS: Final = 60.0
_ABANDONED_SECONDS: Final = 3600.0
_STUCK_SECONDS: Final = 2.0
_TIDY_SECONDS: Final = 3600.0
_FINAL: Final = frozenset({FailureKind.TOO_LARGE, FailureKind.FORBIDDEN, FailureKind.READ_ONLY})
"""Refusals that a retry will not change. A missing or stale login may be mended, so those entries wait."""

_MARKS: Final = "sent"
_MARK_SECONDS: Final = 86_400.0
"""How long an entry counts as known to the remote: a remote that lost it is offered it again a day later."""

_OF_THIS_ENTRY: Final = frozenset({FailureKind.CORRUPT, FailureKind.FULL})
"""Failures that say nothing of the next entry: bytes damaged on their way, or no room for one of this size."""


@dataclass(frozen=True, slots=True)
class SpoolStats:
    """How much waits for the remote."""

    entries: int
    size_bytes: int


def spool_folder(cache_dir: Path, remote_url: str, namespace: Namespace) -> Path:
    """Where entries wait for this remote and namespace."""
    return cache_dir / "spool" / f"{namespace}-{hashlib.sha256(remote_url.encode()).hexdigest()[:16]}"


def spool_stats(folder: Path) -> SpoolStats:
    """What waits in a spool's folder; nothing where it cannot be read."""
    sizes = _pending(folder).values()
    return SpoolStats(len(sizes), sum(sizes))


def _pending(folder: Path) -> dict[Path, int]:
    """The entries that wait, with their sizes: regular files that are named by a key, and nothing else."""
    sizes: dict[Path, int] = {}
    try:
        with os.scandir(folder) as found:
            for entry in found:
                with contextlib.suppress(InvalidName, OSError):  # foreign, or uploaded by another process meanwhile
                    path = folder / Key(entry.name)
                    if entry.is_file(follow_symlinks=False):
                        sizes[path] = entry.stat(follow_symlinks=False).st_size
    except OSError:
        return {}
    return sizes


def _remove(path: Path, file: BinaryIO) -> None:
    """Removes what `file` was opened from, and nothing that another process has put in its place."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.lstat(), os.fstat(file.fileno())):
            path.unlink()


class _Outcome(enum.Enum):
    DONE = enum.auto()
    LATER = enum.auto()
    REMOTE_AWAY = enum.auto()


class Spool:
    """Entries waiting in `folder` for `remote`; thread-safe.

    Args:
        limit_bytes: what may wait at most; beyond it new entries are not spooled, and counted.
    """

    def __init__(
        self,
        folder: Path,
        remote: Store,
        counters: Counters,
        *,
        limit_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._folder = folder
        self._remote = remote
        self._counters = counters
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.RLock()  # guards _thread
        self._pass_lock = threading.RLock()  # one drain of this process at a time; guards the two below
        self._failed: Counter[str] = Counter()
        self._tidied = -math.inf

    def add(self, entry: Entry, *, durable: bool) -> bool:
        """Keeps `entry` for upload and wakes the uploader. False, counted, where it could not be kept.

        Args:
            durable: fsync, so that the entry survives a power cut too.
        """
        try:
            if self.stats().size_bytes + entry.size_bytes > self._limit_bytes:
                raise StoreFull("the spool is full")
            self._write(entry, durable)
        except StoreFull:
            self._counters.not_published("spool_full")
            return False
        except OSError as error:
            _log.warning("the spool could not keep an entry: %s", error.strerror)
            self._counters.failure("spool", FailureKind.IO)
            return False
        self._start()
        self._wake.set()
        return True

    def wants(self, entry: Entry) -> bool:
        """Whether an entry of this machine's disk tier should be added: it does not wait here, and the remote is not
        known to have it.

        So that what was compiled before there was a remote, or for another one, reaches this one too.
        """
        if entry.header.compile_seconds < CHEAP_COMPILE_SECONDS or (self._folder / entry.key).exists():
            return False
        try:
            age_seconds = self._clock.time() - self._mark(entry.key).stat().st_mtime
        except OSError:
            return True
        return age_seconds > _MARK_SECONDS

    def _mark(self, key: Key) -> Path:
        return self._folder / _MARKS / key

    def _remember(self, key: Key) -> None:
        """Notes that the remote has an entry of `key`; where that cannot be noted, it is offered again."""
        mark = self._mark(key)
        with contextlib.suppress(OSError):
            mark.parent.mkdir(mode=0o700, exist_ok=True)
            mark.touch(mode=0o600)
            now = self._clock.time()
            os.utime(mark, (now, now))

    def _forget_old_marks(self) -> None:
        with contextlib.suppress(OSError), os.scandir(self._folder / _MARKS) as found:
            for entry in found:
                with contextlib.suppress(OSError, InvalidName):
                    if self._clock.time() - entry.stat(follow_symlinks=False).st_mtime > _MARK_SECONDS:
                        self._mark(Key(entry.name)).unlink()

    def _write(self, entry: Entry, durable: bool) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{entry.key}.{os.getpid()}.{random.getrandbits(64):016x}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(entry.buffer)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.rename(self._folder / entry.key)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            raise
        if durable:
            FILES.sync_folder(self._folder)

    def stats(self) -> SpoolStats:
        """What waits now, of all processes."""
        return spool_stats(self._folder)

    def resume(self) -> None:
        """Starts to upload what an earlier run left behind, if there is anything."""
        with self._pass_lock:
            self._tidy_hourly()
        if _pending(self._folder):
            self._start()
            self._wake.set()

    def _tidy_hourly(self) -> None:
        """Also in a process that runs for weeks, and starts no other."""
        now = self._clock.monotonic()
        if now - self._tidied >= _TIDY_SECONDS:
            self._tidied = now
            self._collect_abandoned()
            self._forget_old_marks()

    def _collect_abandoned(self) -> None:
        """Removes temporary files that no living writer can own any more."""
        try:
            found = list(self._folder.glob(".*.tmp"))
        except OSError:
            return
        for path in found:
            with contextlib.suppress(OSError):  # another process collects too
                if self._clock.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                    path.unlink()

    def drain(self, seconds: float) -> SpoolStats:
        """Uploads until nothing waits, `seconds` are over, or nothing went for two seconds; gives what still waits.

        So no end of a job waits long for a dead service, a full one, another process that was stopped in an upload, or
        an upload that hangs.
        """
        now = self._clock.monotonic()
        deadline, last_progress = now + seconds, now
        waiting = _pending(self._folder).keys()
        while waiting and now < deadline and now - last_progress < _STUCK_SECONDS:
            failed = self._run_until(deadline)
            left, now = _pending(self._folder).keys(), self._clock.monotonic()
            if waiting - left:
                last_progress = now
            elif failed:
                self._stop.wait(min(0.2, max(0.0, deadline - now)))
            waiting = left
        return self.stats()

    def _run_until(self, deadline: float) -> int:
        """`run_once` in a thread of its own, which is left to itself at the deadline; 1 where it had not ended then."""
        failed = [1]

        def run() -> None:
            failed[0] = self.run_once(deadline)

        thread = threading.Thread(target=run, name="torchtpu-cache-drain", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had, as at the very end of an interpreter
            run()
        else:
            thread.join(max(0.0, deadline - self._clock.monotonic()))
        return failed[0]

    def run_once(self, deadline: float | None = None) -> int:
        """Tries every waiting entry once, the most compile seconds per byte first; gives how many must wait.

        One that failed before comes after those that did not, so that an entry whose upload never ends starves no
        other. Stops early where the remote is unavailable: the others would only fail the same way.
        """
        with self._pass_lock:
            self._tidy_hourly()
            failed = 0
            for path in self._most_valuable_first():
                if self._stop.is_set() or (deadline is not None and self._clock.monotonic() >= deadline):
                    break
                outcome = self._upload(path)
                if outcome is not _Outcome.DONE:
                    self._failed[path.name] += 1
                if outcome is _Outcome.REMOTE_AWAY:
                    return failed + 1
                failed += outcome is _Outcome.LATER
            return failed

    def _most_valuable_first(self) -> list[Path]:
        def worth(path: Path) -> float:
            try:
                with open_regular(path, follows_links=False) as file:
                    frame = Frame.parse(file.read(PREFIX.size))
                    header = Header.from_bytes(file.read(frame.header_bytes))
                return header.compile_seconds / frame.entry_bytes
            except (OSError, StoreError):
                return 0.0

        waiting = _pending(self._folder)
        for gone in self._failed.keys() - {path.name for path in waiting}:
            del self._failed[gone]
        return sorted(waiting, key=lambda path: (self._failed[path.name], -worth(path)))

    def _upload(self, path: Path) -> _Outcome:
        try:
            with open_regular(path, follows_links=False) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if not has_no_locks(error):
                        return _Outcome.LATER  # another process is sending it
                try:
                    return self._send(path, file)
                finally:
                    # Closing would not do where a child was forked meanwhile: it would hold the lock while it lives.
                    with contextlib.suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)
        except FileNotFoundError:
            return _Outcome.DONE
        except (OSError, MemoryError) as error:
            _log.warning("a spooled entry could not be read: %s", error)
            self._counters.failure("spool", FailureKind.IO)
            return _Outcome.LATER

    def _send(self, path: Path, file: BinaryIO) -> _Outcome:
        try:
            entry = read_bare_entry(FILES, OpenFile(file.fileno(), os.fstat(file.fileno())), Key(path.name))
        except StoreError:
            self._counters.failure("spool", FailureKind.CORRUPT)
            _remove(path, file)
            return _Outcome.DONE
        try:
            outcome = self._remote.put(entry)
        except BreakerOpen:
            return _Outcome.REMOTE_AWAY  # the failure that opened it is counted already
        except StoreError as error:
            self._counters.failure(Tier.REMOTE, error.kind)
            if error.kind in _FINAL:
                # The entry stays on this machine's disk tier only.
                _log.warning("the remote does not take %s: %s", entry.key.short, error)
                self._counters.not_published(error.kind)
                _remove(path, file)
                return _Outcome.DONE
            return _Outcome.LATER if error.kind in _OF_THIS_ENTRY else _Outcome.REMOTE_AWAY
        self._counters.published(outcome.status)
        self._remember(entry.key)
        _remove(path, file)
        return _Outcome.DONE

    def _start(self) -> None:
        with self._thread_lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._loop, name="torchtpu-cache-spool", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        pause = _FIRST_RETRY_SECONDS
        while not self._stop.is_set():
            self._wake.clear()
            try:
                failed = self.run_once()
            except Exception:
                _log.exception("a round of the spool failed")
                self._counters.failure("spool", "internal")
                failed = 1
            if failed:
                self._stop.wait(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
                pause = min(2 * pause, _LONGEST_RETRY_SECONDS)
            else:
                pause = _FIRST_RETRY_SECONDS
                self._wake.wait()

    def close(self) -> None:
        """Stops the uploader after the upload that it is in, or two seconds; what waits stays in the folder."""
        self._stop.set()
        self._wake.set()
        with self._thread_lock:
            thread = self._thread
        if thread is not None:
            thread.join(_STUCK_SECONDS)
