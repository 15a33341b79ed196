"""Prints the path of a Python 3.12 or 3.13 on this machine; exit code 1 where there is none.

Looked for on PATH, then beside the interpreter that runs this (as version managers lay them out).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

WANTED = ("3.12", "3.13")


def main() -> int:
    """Prints the first that really starts: a version manager's shim may not."""
    beside = Path(sys.base_prefix).resolve().parent
    for version in WANTED:
        on_path = shutil.which(f"python{version}")
        candidates = [on_path] if on_path else []
        candidates += [str(path) for path in sorted(beside.glob(f"{version}*/bin/python"))]
        for candidate in candidates:
            probe = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(probe, capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.strip() == version:
                print(candidate)
                return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
