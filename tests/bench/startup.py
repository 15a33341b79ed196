"""What importing the package, and asking the command line for help, take over a bare interpreter.

Each is a process of its own, from its start to its end, warm (page cache, byte code): `python -c pass`, `python -c
"import torchtpu_cache"`, and the installed script `torchtpu-cache --help`. Rounds are interleaved; medians are
compared. The help of one command is told; it describes that command's options, which no other command's help does.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from support.clean import clean_folder
from support.figures import Figure, Size
from support.rounds import Taken, interleaved

IMPORT_BAR_MS = 50.0
HELP_BAR_MS = 150.0


def run(size: Size) -> Iterator[Figure]:
    script = str(Path(sys.executable).with_name("torchtpu-cache"))
    commands = {
        "bare": [sys.executable, "-c", "pass"],
        "import": [sys.executable, "-c", "import torchtpu_cache"],
        "help": [script, "--help"],
        "compile_help": [script, "compile", "--help"],
    }
    with clean_folder():
        measured = interleaved(
            size.of(short=5, full=21),
            {way: lambda command=command: _taken(command) for way, command in commands.items()},
        )
    for way, bar in (("import", IMPORT_BAR_MS), ("help", HELP_BAR_MS)):
        extra, shown = measured.extra(way, "bare") * 1000, measured.told(way, "bare")
        yield Figure.at_most(f"startup.{way}", extra, "ms", bar, **shown)
    shown = measured.told("compile_help", "bare")
    yield Figure.told("startup.compile_help", measured.extra("compile_help", "bare") * 1000, "ms", **shown)


def _taken(command: list[str]) -> Taken:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=60)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
