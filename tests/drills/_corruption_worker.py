"""One medium of the corruption drill in a process of its own: what it needs of memory is its own, and it may crash.

    python -m drills._corruption_worker MEDIUM SEED CASES

The last line of its output is a `Tally` in JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from drills._corruption_disk import attack_disk
from drills._corruption_local import attack_aliases, attack_spool
from drills._corruption_service import attack_cold, attack_index, attack_live
from drills._corruption_wire import attack_answers, attack_uploads
from support.clean import clean_folder
from support.tally import Tally

MEDIA: Final[dict[str, Callable[[Path, Tally, int], None]]] = {
    "disk": attack_disk,
    "spool": attack_spool,
    "aliases": attack_aliases,
    "service, live": attack_live,
    "service, starting": attack_cold,
    "service, index": attack_index,
    "wire, answers": attack_answers,
    "wire, uploads": attack_uploads,
}


def main(medium: str, seed: int, cases: int) -> None:
    """Attacks one medium."""
    logging.disable(logging.CRITICAL)  # thousands of warnings are what the product owes, and nobody's news
    tally = Tally(medium, seed)
    with clean_folder() as folder:
        MEDIA[medium](folder, tally, cases)
    print(json.dumps(tally.to_json()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
