"""Our reading of XLA_FLAGS against XLA's own: texts that we take for equal give equal DebugOptions in jaxlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from torchtpu_cache_core.canonical.debug_options import DEBUG_OPTIONS
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.rules import ORDERED_FLAGS

FIELDS = """
import json
from jaxlib import xla_client
from torchtpu_cache_core.canonical.wire import read_fields

options = xla_client.CompileOptions().SerializeAsString()
build = next(f.value for f in read_fields(options) if f.number == 3)
debug = next(f.value for f in read_fields(build) if f.number == 3)
found = {}
for field in read_fields(debug):
    found.setdefault(field.number, []).append(str(field.value))
print(json.dumps({number: sorted(values) for number, values in found.items()}))
"""

READ = """
import json
from jaxlib import xla_client
from torchtpu_cache_core.canonical.options import options_components

options = xla_client.CompileOptions().SerializeAsString()
print(json.dumps([c.to_json() for c in options_components(options, position_independent=False, noted={})]))
"""

EQUAL = [
    [""],
    ["--xla_cpu_enable_fast_math", "--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=1"],
    ["--xla_allow_excess_precision=true --xla_allow_excess_precision=false", "--xla_allow_excess_precision=0"],
    [
        "--xla_cpu_prefer_vector_width=128 --xla_backend_optimization_level=1",
        "\t--xla_backend_optimization_level=1\n --xla_cpu_prefer_vector_width=128 --xla_dump_max_hlo_modules=7",
    ],
    ["--xla_backend_optimization_level=1 --xla_backend_optimization_level=2", "--xla_backend_optimization_level=2"],
    ["--xla_disable_hlo_passes=cse,dce", "--xla_disable_hlo_passes='cse,dce'", '--xla_disable_hlo_passes="cse,d\\ce"'],
    ["--xla_disable_hlo_passes=dce,cse"],
    ["--xla_cpu_max_isa='A B'", '--xla_cpu_max_isa="A B"'],
]


@pytest.fixture(scope="module")
def debug_options(run_python: Any) -> Any:
    if importlib.util.find_spec("jaxlib") is None:
        pytest.skip("jaxlib is not installed, so XLA's own reading cannot be seen")
    return lambda text: str(run_python(READ, environ={"XLA_FLAGS": text} if text else {}))


def ours(text: str) -> object:
    return tuple(Environment.snapshot({"XLA_FLAGS": text} if text else {}, []).components())


def test_equal_texts_mean_the_same_to_xla(debug_options: Any) -> None:
    meanings = []
    for texts in EQUAL:
        assert len({ours(text) for text in texts}) == 1, texts
        seen = {debug_options(text) for text in texts}
        assert len(seen) == 1, texts
        meanings += seen
    assert len(set(meanings)) == len(EQUAL) == len({ours(texts[0]) for texts in EQUAL})


def test_a_flag_file_means_its_content(debug_options: Any, tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_cpu_prefer_vector_width=128")
    assert debug_options(str(flags)) == debug_options(flags.read_text()) != debug_options("")
    assert ours(str(flags)) == ours(flags.read_text())


def test_reading_stops_at_a_bare_word(debug_options: Any) -> None:
    stopped = "--xla_cpu_prefer_vector_width=128 stop --xla_backend_optimization_level=1"
    assert debug_options(stopped) == debug_options("--xla_cpu_prefer_vector_width=128")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_other_flag_sets_a_field_that_is_not_its_own(run_python: Any) -> None:
    """Two flags over one field would make their order count, which only ORDERED_FLAGS take into account."""
    if importlib.util.find_spec("jaxlib") is None:
        pytest.skip("jaxlib is not installed, so XLA's own reading cannot be seen")
    values = {"bool": "true", "int32": "7", "int64": "7", "string": "x"}
    flags = {
        name: values[kind] for name, kind in DEBUG_OPTIONS.values() if kind in values and name not in ORDERED_FLAGS
    }
    base = run_python(FIELDS)

    def strangers(names: list[str]) -> set[str]:
        """Fields that change though no flag of theirs is given; flags that this jaxlib refuses are left out."""
        try:
            found = run_python(FIELDS, environ={"XLA_FLAGS": " ".join(f"--{name}={flags[name]}" for name in names)})
        except AssertionError:
            half = len(names) // 2
            return strangers(names[:half]) | strangers(names[half:]) if half else set()
        changed = {n for n in base.keys() | found.keys() if base.get(n) != found.get(n)}
        return {DEBUG_OPTIONS.get(int(n), (n, ""))[0] for n in changed} - set(names)

    names = sorted(flags)
    step = 32
    assert not set().union(*(strangers(names[i : i + step]) for i in range(0, len(names), step)))
