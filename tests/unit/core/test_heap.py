"""What the allocator of a long-running process gives back, asked of glibc itself in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_MALLINFO = """
import ctypes
libc = ctypes.CDLL(None)
class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
libc.mallinfo2.restype = Mallinfo
"""
_MOVES = """
for _ in range(3):
    block = bytearray(8 << 20)
    del block
before = libc.mallinfo2().hblkhd
block = bytearray(2 << 20)
print(libc.mallinfo2().hblkhd - before >= 2 << 20)
"""
_ARENAS = """
import re, tempfile, threading
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.fclose.argtypes = libc.free.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
all_in = threading.Barrier(8)
def work():
    libc.free(libc.malloc(100_000))
    all_in.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with tempfile.NamedTemporaryFile("r") as told:
    file = libc.fopen(told.name.encode(), b"w")
    libc.malloc_info(0, file)
    libc.fclose(file)
    print(len(re.findall("<heap nr=", told.read())))
"""
_KEEP = "from torchtpu_cache_core.heap import keep_heap_small\nkeep_heap_small()\n"


def _printed(code: str, **environ: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "PYTHONMALLOC"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environ, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("keep", "expected"), [("", "False"), (_KEEP, "True")])
def test_a_large_block_is_a_mapping_of_its_own_whatever_was_freed_before(keep: str, expected: str) -> None:
    assert _printed(keep + _MALLINFO + _MOVES) == expected


def test_threads_share_two_arenas() -> None:
    assert int(_printed(_MALLINFO + _ARENAS)) > 2
    assert int(_printed(_KEEP + _MALLINFO + _ARENAS)) <= 2


def test_what_the_environment_says_of_the_allocator_stands() -> None:
    assert int(_printed(_KEEP + _MALLINFO + _ARENAS, MALLOC_ARENA_MAX="6")) > 2
