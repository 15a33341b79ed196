"""A job of a drill in a process of its own: asks its node for the programs that stand on standard input, line by line.

    python -m support.clockjob FOLDER

Answers each line with one of JSON: the tier, the milliseconds, whether the bytes are right, and the wall time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from support.rig import program, rigged


def main() -> None:
    with rigged(Path(sys.argv[1]), memory=True) as rig:
        for line in sys.stdin:
            milliseconds, tier = rig.ask(program(line.strip()))
            rig.node.flush()
            right = rig.wrong == rig.lost == 0 and not rig.totals()["failures"]
            said = {"tier": tier, "milliseconds": milliseconds, "right": right, "seconds": time.time()}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
