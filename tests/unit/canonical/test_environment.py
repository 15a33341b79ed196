"""The environment part of a key: what changes code is in it, what does not is not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.waiting import rewrite
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.rules import DROPPED_VARIABLES
from torchtpu_cache_core.errors import Bypass, InvalidRequest
from torchtpu_cache_core.key import differences


def taken(environ: Mapping[str, str] = {}, argv: Sequence[str] = (), **more: object) -> Environment:
    return Environment.snapshot(environ, argv, **more)  # type: ignore[arg-type]


def test_components_are_named_by_road_and_flag() -> None:
    environment = taken(
        {"XLA_FLAGS": "--xla_b=1 --xla_a=x", "LIBTPU_INIT_ARGS": "--xla_tpu_c=2", "TPU_MEGACORE": "1", "PATH": "/bin"},
        ["train.py", "--xla_d=3"],
        plugin_options={"max_inflight": 4},
        extras={"torch.deterministic": True},
    )
    assert {c.name: c.text for c in environment.components()} == {
        "env.table": "1",
        "env.LIBTPU_INIT_ARGS.xla_tpu_c": "2",
        "env.TPU_MEGACORE": "1",
        "env.XLA_FLAGS.xla_a": "x",
        "env.XLA_FLAGS.xla_b": "1",
        "env.argv.xla_d": "3",
        "env.extra.torch.deterministic": "true",
        "env.plugin.max_inflight": "4",
    }


def test_every_road_changes_the_key(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1")
    roads = [
        taken(),
        taken({"XLA_FLAGS": "--xla_a=1"}),
        taken({"XLA_FLAGS": "--xla_a=2"}),
        taken({"TF_XLA_FLAGS": "--xla_a=1"}),
        taken({"LIBTPU_INIT_ARGS": "--xla_a=1"}),
        taken({"LIBTPU_INIT_ARGS": "--xla_a=2"}),
        taken({}, ["job", "--xla_a=1"]),
        taken({}, ["job", "--xla_a=2"]),
        taken({"XLA_A": "1"}),
        taken({"TPU_A": "1"}),
        taken({"PJRT_A": "1"}),
        taken(plugin_options={"a": 1}),
        taken(plugin_options={"a": True}),
        taken(extras={"a": 1}),
    ]
    assert len({tuple(environment.components()) for environment in roads}) == len(roads)
    named = taken({"XLA_FLAGS": str(flags)})
    assert named.components() == roads[1].components()
    flags.write_text("--xla_a=2")
    assert taken({"XLA_FLAGS": str(flags)}).components() == roads[2].components()


def test_what_says_nothing_of_code_leaves_the_key_alone() -> None:
    """A port, an address, a pod, a run, a home, a log level, a cache folder."""
    processes = [
        {
            "HOME": f"/home/{i}",
            "HOSTNAME": f"pod-{i}",
            "MASTER_PORT": str(8000 + i),
            "RUN_ID": str(i),
            "BUNDLE_INDEX": str(i),
            "XLA_PERSISTENT_CACHE_PATH": f"/cache/{i}",
            "XLA_FLAGS": f"--xla_dump_to=/tmp/{i} --xla_cpu_enable_fast_math=true",
            **dict.fromkeys(DROPPED_VARIABLES, str(i)),
        }
        for i in range(4)
    ]
    assert len({tuple(taken(environ).components()) for environ in processes}) == 1
    changed = taken({**processes[0], "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"})
    found = differences(taken(processes[0]).components(), changed.components())
    assert [d.name for d in found] == ["env.XLA_FLAGS.xla_cpu_enable_fast_math"]


def test_variables_for_a_child_hold_the_content_of_a_flag_file(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("\n--xla_a=1\n")
    environment = taken({"XLA_FLAGS": str(flags), "TPU_X": "2", "TPU_NAME": "pod", "HOME": "/h"})
    assert environment.variables == (("TPU_X", "2"), ("XLA_FLAGS", "\n--xla_a=1\n"))
    assert taken(dict(environment.variables)).components() == environment.components()


def test_a_flag_file_without_flags(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.write_text("no flags here")
    environment = taken({"XLA_FLAGS": str(flags)})
    assert environment.variables == (("XLA_FLAGS", ""),)
    assert environment.components() != taken().components()


def test_an_absent_flag_file_bypasses() -> None:
    with pytest.raises(Bypass) as caught:
        taken({"XLA_FLAGS": "/nowhere/flags"})
    assert caught.value.reason == "flag_file_unreadable"


def test_flag_takes_the_last_road() -> None:
    environ = {"XLA_FLAGS": "--xla_a=1 --xla_b=1", "LIBTPU_INIT_ARGS": "--xla_a=2"}
    environment = taken(environ, ["job", "--xla_c"])
    assert [environment.flag(name) for name in ("xla_a", "xla_b", "xla_c", "xla_d")] == ["2", "1", "true", None]


def test_a_change_after_the_snapshot_bypasses() -> None:
    environment = taken({"XLA_FLAGS": "--xla_a=1", "RUN_ID": "1"})
    environment.check_unchanged({"XLA_FLAGS": "--xla_a=1", "RUN_ID": "2", "TPU_NAME": "new"})
    for later in ({"XLA_FLAGS": "--xla_a=2"}, {}, {"XLA_FLAGS": "--xla_a=1", "LIBTPU_INIT_ARGS": "--x=1"}):
        with pytest.raises(Bypass) as caught:
            environment.check_unchanged(later)
        assert caught.value.reason == "environment_changed"


@pytest.mark.parametrize("environ", [{"XLA_FLAGS": "{}"}, {"LIBTPU_INIT_ARGS": "--flagfile={}"}, {"TPU_X": "{}"}])
def test_a_file_that_changes_after_the_snapshot_bypasses(tmp_path: Path, environ: dict[str, str]) -> None:
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1")
    given = {"plugin_options": {"a": 1}, "extras": {"b": 2}}
    environment = taken({name: value.format(flags) for name, value in environ.items()}, **given)
    environment.check_files()
    flags.write_text("--xla_a=2")
    with pytest.raises(Bypass) as caught:
        environment.check_files()
    assert caught.value.reason == "environment_changed"
    flags.unlink()
    with pytest.raises(Bypass):
        environment.check_files()


@pytest.mark.parametrize("environ", [{"XLA_FLAGS": "{}"}, {"LIBTPU_INIT_ARGS": "--flagfile={}"}, {"TPU_X": "{}"}])
@pytest.mark.parametrize("by", ["writing", "replacing"])
def test_a_file_that_was_changed_and_changed_back_bypasses(tmp_path: Path, environ: dict[str, str], by: str) -> None:
    """A compiler may have read it in between."""
    flags = tmp_path / "flags"
    flags.write_text("--xla_a=1")
    status = flags.stat()
    environment = taken({name: value.format(flags) for name, value in environ.items()})
    environment.check_files()
    if by == "writing":
        rewrite(flags, "--xla_a=2")
        rewrite(flags, "--xla_a=1")
    else:
        other = tmp_path / "other"
        other.write_text("--xla_a=1")
        other.replace(flags)
    os.utime(flags, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(Bypass) as caught:
        environment.check_files()
    assert caught.value.reason == "environment_changed"
    assert taken({name: value.format(flags) for name, value in environ.items()}) == environment


def test_a_variable_cannot_pose_as_a_flag() -> None:
    assert taken({"XLA_FLAGS.xla_a": "1"}).components() != taken({"XLA_FLAGS": "--xla_a=1"}).components()


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    texts = [taken({"XLA_X": value}).components() for value in ("\udcff", "\udcfe", "ÿ")]
    assert len({tuple(components) for components in texts}) == 3


def test_very_many_flags_fit_one_key() -> None:
    many = " ".join(f"--xla_{i}={i}" for i in range(2000))
    environment = taken({"XLA_FLAGS": many})
    assert len(environment.components()) == 2
    other = taken({"XLA_FLAGS": many.replace("--xla_7=7 ", "--xla_7=8 ")})
    assert environment.components() != other.components()


def test_an_opaque_plugin_option_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="plain values"):
        taken(plugin_options={"callback": print})
