"""A job pays for a compiler only when it compiles."""

from __future__ import annotations

import subprocess
import sys

_HEAVY = ("jax", "jaxlib", "libtpu", "numpy", "pypjrt", "scipy")


def test_choosing_and_describing_imports_no_compiler() -> None:
    code = f"""
import sys
from torchtpu_cache.compilers import base, cpu, registry, tpu
from torchtpu_cache_core.identity import FileIdentities
registry.targets_here()
with registry.Compilers(identities=FileIdentities(None), memo_dir=None) as compilers:
    compilers.for_target("cpu"), compilers.for_target("v5e:2x2")
print(sorted(set({_HEAVY!r}) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
