"""The C library's allocator in a process of ours that runs for weeks: it gives back what a burst of requests took.

By itself glibc has up to eight arenas per core, and with each large block that is freed it raises the size from which a
block is a mapping of its own. Blocks of a megabyte (a table of Python's that grows) then leave holes in an arena each
time they move, and memory grows for hours though nothing is kept. A job's own process is never changed: its allocator
is the job's business.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Final

# mallopt(3), malloc.h of glibc.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8

_SETTINGS: Final = (
    # Threads wait for files and sockets, not for the allocator: two arenas are enough for them.
    (_M_ARENA_MAX, 2, "MALLOC_ARENA_MAX"),
    # Setting either ends the raising of both.
    (_M_MMAP_THRESHOLD, 512 << 10, "MALLOC_MMAP_THRESHOLD_"),
    (_M_TRIM_THRESHOLD, 1 << 20, "MALLOC_TRIM_THRESHOLD_"),
)


def keep_heap_small() -> None:
    """For this process, from now on; what the environment says of an allocator's setting stands.

    Does nothing where the C library has no `mallopt`: there is nothing to mend there.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        for setting, value, variable in _SETTINGS:
            if variable not in os.environ:
                mallopt(setting, value)
