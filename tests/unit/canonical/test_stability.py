"""One key for one program: over processes, hash seeds, folders, locales, and two jaxlib releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

KEYS = """
import json, sys
from pathlib import Path
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.request import Request, Target, resolve

environment = Environment.snapshot(
    {"XLA_FLAGS": "--xla_b=x --xla_a=1", "TPU_X": "1"},
    ["job", "--xla_c=2"],
    plugin_options={"set": {"a", "b", "c", "d"}, "map": {frozenset({"x", "y"}): 1, "z": 2.0}},
)
target = Target.of("t", {"platform": "cpu", "platform_version": "1", "compiler": "2"})
resolver = ProgramCanonicaliser(None)
keys = {}
folder = Path(sys.argv[1])
for path in sorted([*folder.glob("*.mlir*"), *folder.glob("kernels/*.mlir")]):
    request = Request(
        program=path.read_bytes(),
        options=encode_options(num_partitions=2, use_spmd_partitioning=True),
        target=target,
        environment=environment,
        executable_format="pjrt",
    )
    if path.stat().st_size <= int(sys.argv[2]):
        resolved = resolve(request, resolver)
        keys[path.name] = [resolved.key, [c.shown for c in resolved.components if c.name == "program.form"]]
resolver.close()
print(json.dumps(keys, sort_keys=True))
"""


def test_fresh_processes_agree(run_python: Any, corpus: Path, tmp_path: Path) -> None:
    seen = [
        run_python(KEYS, str(corpus), "20000", environ=environ, cwd=cwd)
        for environ, cwd in [
            ({"PYTHONHASHSEED": "0"}, corpus),
            ({"PYTHONHASHSEED": "1", "LANG": "tr_TR.UTF-8", "HOME": "/nowhere"}, tmp_path),
            ({"PYTHONHASHSEED": "random", "XLA_FLAGS": "--xla_dump_to=/x", "TZ": "Asia/Tokyo"}, Path("/")),
        ]
    ]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 15


def test_two_jaxlib_releases_agree(run_python: Any, corpus: Path, other_jaxlib_python: str) -> None:
    version = "import json, importlib.metadata as m; print(json.dumps(m.version('jaxlib')))"
    if run_python(version) == run_python(version, python=other_jaxlib_python):
        pytest.skip(f"{other_jaxlib_python} has the jaxlib release that is tested here")
    ours = run_python(KEYS, str(corpus), "10000000")
    theirs = run_python(KEYS, str(corpus), "10000000", python=other_jaxlib_python)
    assert ours == theirs
    forms = {form for _, (form,) in ours.values()}
    assert forms == {"portable-1.13.0", "portable-1.13.0+payload"}
    assert len(ours) == 32
