"""An environment in which nothing of the person who runs a campaign reaches it, and nothing of it stays."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SETTINGS = ("TORCHTPU_CACHE", "XLA_", "LIBTPU_", "TPU_", "XDG_")
_MEMORY = Path("/dev/shm")


@contextmanager
def clean_folder(*, in_memory: bool = False) -> Iterator[Path]:
    """A new folder, removed at the end, with HOME in it and no setting of ours in the environment meanwhile.

    Args:
        in_memory: on a file system in memory where there is one, for what a slow disk would only blur.
    """
    parent = _MEMORY if in_memory and os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="ttc-drill-", dir=parent))
    before = dict(os.environ)
    try:
        for name in before:
            if name.startswith(_SETTINGS):
                del os.environ[name]
        os.environ["HOME"] = str(folder)
        os.environ["TORCHTPU_CACHE_DIR"] = str(folder / "cache")
        yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)
