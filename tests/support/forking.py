"""Forks of a process with threads: what they leave behind must not be waited for."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

_HANGS_SECONDS = 20


def succeeds_in_fork(check: Callable[[], object]) -> bool:
    """Whether `check` returns, without an exception and in time, in a forked child of this process."""
    if (pid := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_HANGS_SECONDS)
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
