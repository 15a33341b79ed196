"""libtpu by topology for real, with no TPU here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.compilers import ADD, SHARDY_OPTIONS, SHARDY_SUM, SUM_OVER_PARTITIONS, new_compiler, request_for
from torchtpu_cache.compilers.base import ROAD_TOPOLOGY, Compiler
from torchtpu_cache.compilers.children import ChildPool
from torchtpu_cache.compilers.topology import EXAMPLES
from torchtpu_cache.compilers.tpu import TpuCompiler
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.errors import CompileError, CompilerCrashed, InvalidRequest, LoadError
from torchtpu_cache_core.request import FORMAT_PJRT, Target

pytestmark = pytest.mark.tpu

ONE = encode_options(use_spmd_partitioning=False)
PLAIN = Environment.snapshot({}, ())


@pytest.fixture
def fresh(memo_dir: Path) -> Iterator[Compiler]:
    with new_compiler("tpu", memo_dir) as compiler:
        yield compiler


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_accepted_and_described(tpu: Compiler, name: str) -> None:
    target = tpu.describe(name, ONE, PLAIN)
    assert target.platform == "tpu"
    assert target.part("platform_version").startswith("TFRT TPU")
    assert target.part("device_kind").startswith("TPU")
    assert int(target.part("device_count")) >= 4
    assert not target.position_independent


def test_targets_differ_by_chip_and_by_shape(tpu: Compiler) -> None:
    parts = {tpu.describe(name, ONE, PLAIN).parts for name in ("v5e:2x2", "v5e:2x4", "v5e:4x2", "v6e:2x2")}
    assert len(parts) == 4


def test_two_names_of_one_topology_are_one_target(tpu: Compiler) -> None:
    assert tpu.describe("v5e:2x2", ONE, PLAIN).parts == tpu.describe("v5e:2x2x1", ONE, PLAIN).parts


def test_a_large_slice_is_described_within_bounds(tpu: Compiler) -> None:
    target = tpu.describe("v5p:16x16x16", ONE, PLAIN)
    assert target.part("device_count") == "4096"
    assert target.part("devices").startswith("sha256:")


def test_a_second_process_describes_a_known_target_without_libtpu(
    tpu: Compiler, fresh: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They share the folder of memos, as two processes on one machine do.
    known = tpu.describe("v5e:2x2", ONE, PLAIN)

    def call(*args: object, **kwargs: object) -> None:
        raise AssertionError("a child was asked")

    monkeypatch.setattr(ChildPool, "call", call)
    assert fresh.describe("v5e:2x2", ONE, PLAIN) == known
    flagged = Environment.snapshot({"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=4096"}, ())
    for name, environment in (("v5e:2x2", flagged), ("v5e:4x8", PLAIN)):
        with pytest.raises(AssertionError, match="a child was asked"):
            fresh.describe(name, ONE, environment)


@pytest.mark.parametrize("target_name", ["v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("name", ["jax_add", "jax_matmul_gelu", "torch_mlp_inf"])
def test_real_programs_compile(tpu: Compiler, corpus: Path, target_name: str, name: str) -> None:
    request = request_for(tpu, target_name, (corpus / f"{name}.mlirbc").read_bytes())
    compiled = tpu.compile(request)
    assert tpu.executable_format == FORMAT_PJRT
    assert len(compiled.executable) > 10_000
    assert compiled.road == ROAD_TOPOLOGY
    assert compiled.compiler_sha256 == request.target.compiler
    assert 0 < compiled.compile_seconds < 60
    assert compiled.producer.isprintable()
    assert len(compiled.producer) <= 256


def test_a_compile_leaves_no_log_file(fresh: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPU_LOG_DIR", "TPU_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(fresh, TpuCompiler)
    before = log_files()
    fresh.compile(request_for(fresh, "v5e:2x2", ADD))
    (pid,) = fresh._pool.pids()
    assert not [path for path in log_files() - before if path.suffix == f".{pid}"]


def log_files() -> set[Path]:
    return {path for folder in ("/tmp", "/tmp/tpu_logs") for path in Path(folder).glob("tpu_driver.*")}


def test_several_partitions_compile(tpu: Compiler) -> None:
    assert tpu.compile(request_for(tpu, "v5e:2x2", SUM_OVER_PARTITIONS, num_partitions=2)).executable
    assert tpu.compile(request_for(tpu, "v5e:2x2", SHARDY_SUM, options=SHARDY_OPTIONS)).executable


@pytest.mark.parametrize(
    ("name", "reason"),
    [("v5e:3x3", "not divisible"), ("v9z:2x2", "Invalid TPU"), ("v4:4x4x8_twisted", "wrapping")],
)
def test_a_topology_that_libtpu_refuses_gets_a_sentence_with_some_that_work(
    tpu: Compiler, name: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"^libtpu refuses the target {name}: .*{reason}.*, v5e:2x2, [^\n]*$"):
        tpu.describe(name, ONE, PLAIN)


@pytest.mark.parametrize("program", [b"", b"hello", b"ML\xefR\x01garbage"])
def test_what_is_no_program_is_refused_in_one_sentence(tpu: Compiler, program: bytes) -> None:
    with pytest.raises(CompileError, match=r"^libtpu refused the program for v5e:2x2: [^\n]+$") as caught:
        tpu.compile(request_for(tpu, "v5e:2x2", program))
    assert type(caught.value) is CompileError, "the child lives on"


def test_an_unknown_flag_costs_its_environment_only(fresh: Compiler) -> None:
    with pytest.raises(CompilerCrashed, match="Unknown command line flag 'xla_no_such_flag'"):
        fresh.describe("v5e:2x2", ONE, Environment.snapshot({"LIBTPU_INIT_ARGS": "--xla_no_such_flag=1"}, ()))
    assert fresh.compile(request_for(fresh, "v5e:2x2", ADD)).executable


def test_options_that_are_no_message_are_refused(tpu: Compiler) -> None:
    request = dataclasses.replace(request_for(tpu, "v5e:2x2", ADD), options=b"\xff\xff")
    with pytest.raises(InvalidRequest, match="CompileOptionsProto"):
        tpu.compile(request)


def test_two_children_compile_side_by_side(memo_dir: Path) -> None:
    with new_compiler("tpu", memo_dir, pool_size=2) as compiler, ThreadPoolExecutor(2) as threads:
        request = request_for(compiler, "v5e:2x2", ADD)
        assert all(compiled.executable for compiled in threads.map(compiler.compile, [request] * 4))


def test_a_target_without_identity_is_compiled_for(tpu: Compiler) -> None:
    request = request_for(tpu, "v5e:2x2", ADD)
    anonymous = Target.without_identity("v5e:2x2", "no digest")
    assert tpu.compile(dataclasses.replace(request, target=anonymous)).executable


def test_nothing_is_live_here_and_the_entry_is_not_blamed(tpu: Compiler) -> None:
    with pytest.raises(LoadError, match="v5e:2x2 is not live in this process") as caught:
        tpu.load(b"executable", request_for(tpu, "v5e:2x2", ADD))
    assert not caught.value.blames_entry


def test_libtpu_never_enters_this_process(tpu: Compiler) -> None:
    tpu.compile(request_for(tpu, "v5e:2x2", ADD))
    assert "libtpu.so" not in Path("/proc/self/maps").read_text()
