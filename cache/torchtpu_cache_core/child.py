"""A helper process that answers one request at a time over a socket, and can be killed without harm.

Hostile or crashing work (MLIR parsing, XLA compiles) runs in such a process: an abort, an endless loop or a memory
bomb there costs one request. Frames, both ways: u32 header length, u64 payload length (little-endian), a JSON object,
the payload. The child's own standard output goes to its standard error from its very start, so that nothing that
Python or a library prints can break a frame. Standard error is a pipe that is read during calls; the last of it is kept
for the message of a death, and a child that prints between calls waits for the next one once the pipe is full. Frames
go through a socket, because a write into a pipe that a dead child left would kill a job which has SIGPIPE at its
default.

The child ends when the parent does: it holds the reading end of a pipe whose writing end only the parent has. (The
kernel's parent-death signal would follow the parent's *thread*.) A fork of the parent gives its copies back at once,
and starts children of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from torchtpu_cache_core.errors import CacheError

_FRAME: Final = struct.Struct("<IQ")
_MAX_HEADER_BYTES: Final = 16 << 20
_MAX_PAYLOAD_BYTES: Final = 8 << 30
_CHUNK_BYTES: Final = 1 << 20
_STDERR_TAIL_BYTES: Final = 64 << 10
_MOST_PIPE_BYTES: Final = 1 << 20  # what an unprivileged pipe can hold
_CHANNEL: Final = "TORCHTPU_CACHE_CHILD_CHANNEL"
_LIFELINE: Final = "TORCHTPU_CACHE_CHILD_LIFELINE"

Handler = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


class ChildDied(CacheError):
    """The helper process ended, or broke the protocol, before it answered.

    Args:
        stderr_tail: its last words.
        returncode: its exit code, negative for the signal that ended it; None where it had to be ended.
    """

    def __init__(self, message: str, stderr_tail: str, returncode: int | None = None) -> None:
        super().__init__(message)
        self.stderr_tail = stderr_tail
        self.returncode = returncode


class ChildTimeout(CacheError):
    """The helper process did not answer within the deadline, and was killed."""


class ChildProcess:
    """Runs `python -m module` and talks to the `serve` loop in it. Started at the first call, and after a death.

    Thread-safe: one call at a time, the others wait.

    Args:
        module: an importable module whose `main` calls `serve`.
        environ: the child's whole environment, a copy of this process's by default.
    """

    def __init__(self, module: str, environ: Mapping[str, str] | None = None) -> None:
        self._module = module
        self._environ = dict(os.environ if environ is None else environ)
        self._lock = threading.RLock()  # guards all below, and the socket
        self._is_asked = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._stderr: _Tail | None = None
        self._lifeline: int | None = None
        _CHILDREN.add(self)

    @property
    def pid(self) -> int | None:
        """Of the child; None before its start and after its end."""
        process = self._process
        return None if process is None else process.pid

    def resident_bytes(self) -> int:
        """What the running child holds in memory; 0 where none runs."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            return 0
        return pages * os.sysconf("SC_PAGE_SIZE")

    def call(
        self, header: Mapping[str, Any], payload: bytes | memoryview = b"", *, deadline_seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """Sends one request and waits for its answer.

        Raises:
            ChildDied: the child ended first, and the next call starts another; or a signal's handler calls in the
                middle of a call of its own thread.
            ChildTimeout: the deadline passed; the child was killed.
        """
        with self._lock:
            if self._is_asked:
                raise ChildDied(f"the helper process {self._module} is asked by what interrupted its asker", "")
            self._is_asked = True
            try:
                raw = json.dumps(header).encode()
                frame = _FRAME.pack(len(raw), len(payload)) + raw
                channel = _Channel(*self._running(), time.monotonic() + deadline_seconds)
                channel.send(memoryview(frame))
                channel.send(memoryview(payload))
                header_bytes, payload_bytes = _FRAME.unpack(channel.receive(_FRAME.size))
                if header_bytes > _MAX_HEADER_BYTES or payload_bytes > _MAX_PAYLOAD_BYTES:
                    raise EOFError
                answer = json.loads(channel.receive(header_bytes))
                return answer, bytes(channel.receive(payload_bytes))
            except (EOFError, OSError, ValueError) as error:
                returncode = self._returncode()
                tail = self._end()
                how = "" if returncode is None else _how_it_ended(returncode)
                message = f"the helper process {self._module} ended without an answer{how}"
                raise ChildDied(message, tail, returncode) from error
            except ChildTimeout:
                self._end()
                raise
            except BaseException:
                # An interrupted call leaves half a frame in the socket.
                self._end()
                raise
            finally:
                self._is_asked = False

    def close(self) -> None:
        """Ends the child, if one runs."""
        with self._lock:
            self._end()

    def _running(self) -> tuple[socket.socket, _Tail]:
        """This end of the socket to the child, which is started where none runs, and what it prints."""
        is_running = self._process is not None and self._process.poll() is None
        if is_running and self._socket is not None and self._stderr is not None:
            return self._socket, self._stderr
        self._end()
        self._socket, theirs = (socket.socket(fileno=_moved(end.detach())) for end in socket.socketpair())
        lifeline, self._lifeline = map(_moved, os.pipe())
        printed, printing = map(_moved, os.pipe())
        self._stderr = _Tail(printed)
        try:
            self._socket.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],  # no module of the working directory stands in for one
                stdin=subprocess.DEVNULL,
                stdout=printing,
                stderr=printing,
                env={**self._environ, _CHANNEL: str(theirs.fileno()), _LIFELINE: str(lifeline)},
                pass_fds=(theirs.fileno(), lifeline),
                cwd=_working_directory(),
                start_new_session=True,  # a Ctrl-C is for the parent to handle
            )
        finally:
            theirs.close()
            os.close(lifeline)
            os.close(printing)
        return self._socket, self._stderr

    def _returncode(self) -> int | None:
        """How the child ended by itself; None if it still runs."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Its socket closes a moment before it can be waited for.
            return self._process.wait(timeout=1.0)
        return None

    def _end(self) -> str:
        """Kills and reaps the child; gives the last of its standard error."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        return self._release()

    def _release(self) -> str:
        """Closes this end of everything; gives the last of the child's standard error."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self._stderr is None:
            return ""
        tail, self._stderr = self._stderr.close(), None
        return tail

    def forget(self) -> None:
        """In a fork of the process that started the child: closes the copies, which would keep it alive after its
        parent. The lock may be held by a thread that is not there any more."""
        self._lock = threading.RLock()
        self._is_asked = False
        self._release()
        if self._process is not None:
            self._process.returncode = 0  # the parent's to wait for
            self._process = None


_CHILDREN: Final[weakref.WeakSet[ChildProcess]] = weakref.WeakSet()


def _forget_children() -> None:
    for child in list(_CHILDREN):
        child.forget()


os.register_at_fork(after_in_child=_forget_children)


class _Tail:
    """The last of what a child prints, out of the reading end of its pipe. No call waits."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd: int | None = fd
        self._kept = bytearray()

    def read(self) -> None:
        """Takes some of what is there."""
        if self.fd is None:
            return
        try:
            piece = os.read(self.fd, _STDERR_TAIL_BYTES)
        except BlockingIOError:
            return
        if not piece:  # closed by the child
            os.close(self.fd)
            self.fd = None
        self._kept += piece
        del self._kept[:-_STDERR_TAIL_BYTES]

    def close(self) -> str:
        """Takes what the pipe holds, and gives the last of all. A child's child may still print; that is lost."""
        for _ in range(_MOST_PIPE_BYTES // _STDERR_TAIL_BYTES):
            self.read()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        return self._kept.decode(errors="replace")


def _moved(fd: int) -> int:
    """The same descriptor clear of 0 to 2: a job may have closed those, and whoever then prints writes into ours."""
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def _working_directory() -> str | None:
    """None for this process's own, which names in flags may be relative to. Not one that was removed: libtpu aborts."""
    try:
        Path.cwd()
    except OSError:
        return "/"
    return None


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f" (exit code {returncode})"
    try:
        return f" (killed by {signal.Signals(-returncode).name})"
    except ValueError:
        return f" (killed by signal {-returncode})"


class _Channel:
    """The parent's end of the socket, under one deadline; reads what the child prints whenever it waits."""

    def __init__(self, end: socket.socket, printed: _Tail, deadline: float) -> None:
        self._end = end
        self._printed = printed
        self._deadline = deadline

    def _wait(self, event: int) -> None:
        while True:
            poller = select.poll()
            poller.register(self._end, event)
            if self._printed.fd is not None:
                poller.register(self._printed.fd, select.POLLIN)
            left = self._deadline - time.monotonic()
            ready = [fd for fd, _ in poller.poll(left * 1000)] if left > 0 else []
            if not ready:
                raise ChildTimeout("the helper process did not answer in time and was ended")
            if self._printed.fd in ready:
                self._printed.read()
            if self._end.fileno() in ready:
                return

    def send(self, data: memoryview) -> None:
        while data:
            self._wait(select.POLLOUT)
            with contextlib.suppress(BlockingIOError):
                data = data[self._end.send(data[:_CHUNK_BYTES], socket.MSG_NOSIGNAL) :]

    def receive(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            self._wait(select.POLLIN)
            with contextlib.suppress(BlockingIOError):
                piece = self._end.recv(min(_CHUNK_BYTES, size - len(data)))
                if not piece:
                    raise EOFError
                data += piece
        return data


def serve(handler: Handler, *, after: Callable[[], None] | None = None) -> NoReturn:
    """The child's loop: answers requests with `handler` until its parent is gone. Never returns.

    What `handler` raises ends the child; an expected failure is an answer.

    Args:
        after: called once each answer is sent, for what its reader need not wait for.
    """
    channel, lifeline = (int(os.environ.pop(name)) for name in (_CHANNEL, _LIFELINE))
    for fd in (channel, lifeline):
        os.set_inheritable(fd, False)
    requests, answers = os.fdopen(channel, "rb"), os.fdopen(os.dup(channel), "wb")
    with contextlib.suppress(OSError):
        # Native code that holds the interpreter's lock would keep the thread from ending the process.
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    while prefix := requests.read(_FRAME.size):
        header_bytes, payload_bytes = _FRAME.unpack(prefix)
        header = json.loads(requests.read(header_bytes))
        answer, payload = handler(header, requests.read(payload_bytes))
        raw = json.dumps(answer).encode()
        answers.write(_FRAME.pack(len(raw), len(payload)) + raw)
        answers.write(payload)
        answers.flush()
        if after is not None:
            after()
    os._exit(0)  # libraries that hold threads or device locks may hang in their own clean-up


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(1)
