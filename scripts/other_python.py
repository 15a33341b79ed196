"""Prints an interpreter and a jaxlib release for it that is not the one tested here: `<path> <release>`.

Keys must be equal under two jaxlib releases, and the newer one needs Python 3.12. Under 3.11 this looks for a 3.12 or
3.13, on PATH, then beside the interpreter that runs this (as version managers lay them out); exit code 1 where there
is none. A newer interpreter takes the older release itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

OLDER = "0.10.2"
NEWER = "0.12.0.1"
NEWER_NEEDS = (3, 12)
WANTED = ("3.12", "3.13")


def main() -> int:
    """Prints the first that really starts: a version manager's shim may not."""
    if sys.version_info >= NEWER_NEEDS:
        print(sys.executable, OLDER)
        return 0
    beside = Path(sys.base_prefix).resolve().parent
    for version in WANTED:
        on_path = shutil.which(f"python{version}")
        candidates = [on_path] if on_path else []
        candidates += [str(path) for path in sorted(beside.glob(f"{version}*/bin/python"))]
        for candidate in candidates:
            probe = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(probe, capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.strip() == version:
                print(candidate, NEWER)
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
