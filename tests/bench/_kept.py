"""Executables for a real TPU topology, compiled by the real libtpu once, and kept in `.bench/cache`."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench._hits import module
from support.clean import clean_folder
from torchtpu_cache.api import CompiledProgram, compile_with
from torchtpu_cache.assembly import assemble
from torchtpu_cache_core import config

TARGET = "v5e:2x2"
KEPT = Path(__file__).parents[2] / ".bench" / "cache"


def kept(names: Sequence[str]) -> list[CompiledProgram]:
    """What modules of the corpus compile to for TARGET. What is not kept yet takes minutes, told on standard error."""
    with clean_folder():
        os.environ["TORCHTPU_CACHE_DIR"] = str(KEPT)
        assembly = assemble(config.load().config)
        try:
            made = []
            for name in names:
                with _told(name):
                    made.append(compile_with(assembly, module(name), target=TARGET))
            return made
        finally:
            assembly.close()


@contextmanager
def _told(name: str) -> Iterator[None]:
    ended, started = threading.Event(), time.monotonic()

    def tell() -> None:
        while not ended.wait(20):
            seconds = time.monotonic() - started
            print(f"  compiling {name} for {TARGET}, once: {seconds:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
