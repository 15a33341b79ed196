"""The option tables against the descriptors inside the installed jaxlib."""

from __future__ import annotations

import pytest

from support.descriptors import Message, messages_of
from torchtpu_cache_core.canonical.debug_options import DEBUG_OPTIONS
from torchtpu_cache_core.canonical.options import BUILD_OPTIONS, COMPILE_OPTIONS
from torchtpu_cache_core.canonical.rules import DROPPED_FLAGS, FILE_FLAGS, ORDERED_FLAGS
from torchtpu_cache_core.jaxlib_library import jaxlib_library


@pytest.fixture(scope="module")
def messages() -> dict[str, Message]:
    library = jaxlib_library()
    if library is None:
        pytest.skip("jaxlib is not installed, so there is no descriptor to compare with")
    return messages_of(library)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("DebugOptions", DEBUG_OPTIONS),
        ("CompileOptionsProto", {n: (r[0], r[1].replace("override map", "map")) for n, r in COMPILE_OPTIONS.items()}),
        ("ExecutableBuildOptionsProto", {n: (row[0], row[1]) for n, row in BUILD_OPTIONS.items()}),
    ],
)
def test_table_agrees_with_jaxlib(messages: dict[str, Message], name: str, table: Message) -> None:
    descriptor = messages[name]
    moved = {n: (table[n], descriptor[n]) for n in table.keys() & descriptor.keys() if table[n] != descriptor[n]}
    assert not moved
    known = {row[0] for row in table.values()}
    assert not [row[0] for n, row in descriptor.items() if n not in table and row[0] in known]
    appeared = {n: row for n, row in descriptor.items() if n not in table}
    assert not [row for row in appeared.values() if row[1] == "map"], "a map field is written in random order"
    for number, (field, kind) in sorted(appeared.items()):
        print(f"{name} has a field that the table does not know: {number} {field} ({kind})")


def test_rules_name_real_options() -> None:
    names = {name for name, _ in DEBUG_OPTIONS.values()}
    absl = {
        "alsologtostderr",
        "log_dir",
        "logtostderr",
        "minloglevel",
        "stderrthreshold",
        "tpu_log_dir",
        "v",
        "vmodule",
    }
    assert set(DROPPED_FLAGS) - names == absl
    assert names >= FILE_FLAGS
    assert ORDERED_FLAGS - names == {"xla_gpu_enable_libnvjitlink", "xla_gpu_graph_level"}
    assert not (set(DROPPED_FLAGS) & (FILE_FLAGS | ORDERED_FLAGS))
