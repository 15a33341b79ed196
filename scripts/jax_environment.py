"""Makes an environment with another release of JAX, and this package in it: `jax_environment.py <folder>`.

`.venv-jax-<release>` gets that release; `.venv-other` the newest where the interpreter of `.venv` is too old for it,
and else the one that an older interpreter would have in `.venv`. An interpreter is looked for on PATH, then where
version managers have them: beside the one that runs this, and beside the shims on PATH. Where there is none, this
says so and makes nothing: the tests that need the environment are then skipped, which with CI=true is a failure.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEWEST, OLDER = "0.12.0.1", "0.10.2"
NEWEST_NEEDS = (3, 12)

INTERPRETERS = {
    "0.4.30": ("3.11", "3.12"),
    "0.6.2": ("3.11", "3.12", "3.13"),
    OLDER: ("3.11", "3.12", "3.13"),
    NEWEST: ("3.12", "3.13"),
}
"""By release of JAX: the Python versions that are tried, in this order."""

PINS = {
    "0.4.30": ("numpy==2.2.6", "scipy==1.15.3", "ml_dtypes==0.5.4", "opt_einsum==3.4.0"),
    "0.6.2": ("numpy==2.2.6", "scipy==1.15.3", "ml_dtypes==0.5.4", "opt_einsum==3.4.0"),
    OLDER: ("numpy==2.4.6", "scipy==1.17.1", "ml_dtypes==0.6.0", "opt_einsum==3.4.0"),
    NEWEST: ("numpy==2.5.5", "scipy==1.18.1", "ml_dtypes==0.6.0", "opt_einsum==3.4.0"),
}
"""What JAX brings along, so that a run next year tests the same."""


def release_for(folder: str) -> str:
    """The release that belongs into a folder of this name."""
    if folder == ".venv-other":
        return OLDER if sys.version_info >= NEWEST_NEEDS else NEWEST
    return folder.removeprefix(".venv-jax-")


def interpreter(versions: tuple[str, ...]) -> str | None:
    """The first that really starts: a version manager's shim may not."""
    if ".".join(map(str, sys.version_info[:2])) in versions:
        return sys.executable
    beside = Path(sys.base_prefix).resolve().parent
    for version in versions:
        on_path = shutil.which(f"python{version}")
        candidates = [on_path] if on_path else []
        for folder in (beside, *([Path(on_path).parents[1] / "versions"] if on_path else [])):
            candidates += [str(path) for path in sorted(folder.glob(f"{version}*/bin/python"))]
        for candidate in candidates:
            probe = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(probe, capture_output=True, text=True, check=False)
            if answer.returncode == 0 and answer.stdout.strip() == version:
                return candidate
    return None


def main(folder: Path) -> int:
    """Makes or renews the environment; its `stamp` says that it is whole."""
    release = release_for(folder.name)
    python = interpreter(INTERPRETERS[release])
    if python is None:
        wanted = " or ".join(INTERPRETERS[release])
        print(f"no Python {wanted} was found: the tests with jax {release} are skipped")
        return 0
    print(f"installing jax {release} into {folder.name} ...")
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, f"jax=={release}", f"jaxlib=={release}", *PINS[release], "-e", ROOT], check=True)
    (folder / "stamp").touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
