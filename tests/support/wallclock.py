"""Wall clocks that jump: as an object for this process, and preloaded into real processes."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import time
from pathlib import Path
from typing import Final

YEAR: Final = 366 * 86_400
_SOURCE: Final = Path(__file__).with_suffix(".c")


class JumpingClock:
    """The machine's clock, whose wall time is off by `offset_seconds`."""

    def __init__(self, offset_seconds: float = 0.0) -> None:
        self.offset_seconds = offset_seconds

    def time(self) -> float:
        return time.time() + self.offset_seconds

    def monotonic(self) -> float:
        return time.monotonic()


class PreloadedClock:
    """The wall clock of every process that is started with `environment`, movable while they run.

    Args:
        folder: for the library, which is compiled here, and the offset.

    Raises:
        OSError, CalledProcessError: there is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        library, offset = folder / "wallclock.so", folder / "wallclock.offset"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_SOURCE)], check=True, capture_output=True
        )
        offset.write_bytes(bytes(8))
        with offset.open("rb+") as file:
            self._page = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "TTC_WALL_CLOCK": str(offset)}

    def jump(self, offset_seconds: int) -> None:
        """From now on, wall time is off by so much."""
        self._page[:] = struct.pack("=q", offset_seconds)

    def jump_to(self, seconds: int) -> None:
        """From now on, so many seconds have passed since the epoch."""
        self.jump(seconds - int(time.time()))

    def time(self) -> float:
        """What such a process reads now."""
        return time.time() + struct.unpack("=q", self._page[:])[0]

    def close(self) -> None:
        self._page.close()


def preloaded(environment: dict[str, str]) -> dict[str, str]:
    """This process's environment with the clock's."""
    return {**os.environ, **environment}
