"""XLA:CPU for real: compiled in a child, loaded here, and equal to a compile without us."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from support.compilers import (
    ADD,
    CHOLESKY,
    SHARDY_OPTIONS,
    SHARDY_SUM,
    SUM_OF_REPLICAS,
    SUM_OVER_PARTITIONS,
    new_compiler,
    request_for,
)
from torchtpu_cache.compilers.base import ROAD_CLIENT, ArrayShape, Compiler
from torchtpu_cache.compilers.cpu_loaded import CpuLoaded
from torchtpu_cache.compilers.jaxlib_cpu import import_jaxlib, start_client
from torchtpu_cache_core.canonical.wire import length_field, varint_field
from torchtpu_cache_core.errors import Bypass, CompileError, CompilerCrashed, InvalidRequest, LoadError
from torchtpu_cache_core.request import FORMAT_JAXLIB, Target

FOUR = numpy.arange(4, dtype=numpy.float32)


@pytest.fixture
def fresh(memo_dir: Path) -> Iterator[Compiler]:
    with new_compiler("cpu", memo_dir) as compiler:
        yield compiler


def inputs_for(shapes: tuple[ArrayShape, ...]) -> list[numpy.ndarray]:
    random = numpy.random.default_rng(1)
    return [numpy.asarray(random.uniform(0, 2, shape.dimensions)).astype(shape.dtype) for shape in shapes]


def compiled_directly(program: bytes, options: bytes) -> CpuLoaded:
    xla_client: Any = import_jaxlib()
    client = start_client(xla_client, 1)
    devices = xla_client.DeviceList(tuple(client.devices()))
    parsed = xla_client.CompileOptions.ParseFromString(options)
    return CpuLoaded(xla_client, client.compile_and_load(program, devices, parsed))


def test_what_a_compile_tells(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", ADD)
    compiled = cpu.compile(request)
    assert cpu.executable_format == FORMAT_JAXLIB
    assert compiled.compiler_sha256 == request.target.compiler
    assert compiled.road == ROAD_CLIENT
    assert 0 < compiled.compile_seconds < 60
    assert "jaxlib" in compiled.producer


@pytest.mark.parametrize("name", ["jax_add", "jax_matmul_gelu", "torch_mlp_inf", "torch_llama2_inf"])
def test_real_programs_give_what_a_direct_compile_gives(cpu: Compiler, corpus: Path, name: str) -> None:
    program = (corpus / f"{name}.mlirbc").read_bytes()
    request = request_for(cpu, "cpu", program)
    loaded = cpu.load(cpu.compile(request).executable, request)
    direct = compiled_directly(program, request.options)
    inputs = inputs_for(loaded.parameter_shapes())
    ours, theirs = loaded.execute(inputs), direct.execute(inputs)
    assert [output.tobytes() for output in ours] == [output.tobytes() for output in theirs]
    assert ours


def test_text_is_a_program_too(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", ADD)
    loaded = cpu.load(memoryview(cpu.compile(request).executable), request)
    assert loaded.device_ids == (0,)
    assert loaded.parameter_shapes() == (ArrayShape((4,), "float32"),) * 2
    assert [output.tolist() for output in loaded.execute([FOUR, FOUR])] == [[0, 2, 4, 6]]


def test_replicas_run_on_a_device_each(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", SUM_OF_REPLICAS, num_replicas=2)
    loaded = cpu.load(cpu.compile(request).executable, request)
    assert loaded.device_ids == (0, 1)
    assert [output.tolist() for output in loaded.execute([FOUR])] == [[0, 2, 4, 6]]


def test_partitions_run_on_a_device_each(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", SUM_OVER_PARTITIONS, num_partitions=2)
    loaded = cpu.load(cpu.compile(request).executable, request)
    assert loaded.device_ids == (0, 1)
    assert loaded.parameter_shapes() == (ArrayShape((4,), "float32"),)
    assert [output.tolist() for output in loaded.execute([FOUR])] == [12]


def test_programs_that_are_sharded_as_jax_does_it_run(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", SHARDY_SUM, options=SHARDY_OPTIONS)
    loaded = cpu.load(cpu.compile(request).executable, request)
    assert loaded.device_ids == (0, 1)
    assert [output.tolist() for output in loaded.execute([FOUR])] == [12]


def assigned_to(*devices: int) -> bytes:
    """Options for one replica on each of these devices."""
    replicas = len(devices)
    assignment = varint_field(1, replicas) + varint_field(2, 1) + length_field(3, length_field(1, bytes(devices)))
    return length_field(3, varint_field(4, replicas) + varint_field(5, 1) + length_field(9, assignment))


def test_an_executable_is_loaded_where_the_device_assignment_says(
    cpu: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    first = request_for(cpu, "cpu", ADD, options=assigned_to(0))
    second = request_for(cpu, "cpu", ADD, options=assigned_to(1))
    executable = cpu.compile(first).executable
    assert cpu.load(executable, first).device_ids == (0,)
    loaded = cpu.load(executable, second)
    assert loaded.device_ids == (1,)
    assert loaded.execute([FOUR, FOUR])[0].tolist() == [0, 2, 4, 6]
    absent = dataclasses.replace(second, options=assigned_to(7))
    with pytest.raises(LoadError, match="no CPU device 7") as caught:
        cpu.load(cpu.compile(absent).executable, absent)
    assert not caught.value.blames_entry


def test_the_order_of_a_device_assignment_holds(cpu: Compiler) -> None:
    straight = request_for(cpu, "cpu", SUM_OF_REPLICAS, options=assigned_to(0, 1))
    turned = request_for(cpu, "cpu", SUM_OF_REPLICAS, options=assigned_to(1, 0))
    loaded = cpu.load(cpu.compile(straight).executable, turned)
    assert loaded.device_ids == (1, 0)
    assert loaded.execute([FOUR])[0].tolist() == [0, 2, 4, 6]


def test_lapack_can_be_called(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", CHOLESKY)
    loaded = cpu.load(cpu.compile(request).executable, request)
    [root] = loaded.execute([numpy.array([[4, 0], [0, 9]], numpy.float32)])
    assert numpy.diag(root).tolist() == [2, 3]


def test_the_request_s_flags_reach_the_compiler(cpu: Compiler, tmp_path: Path) -> None:
    request = request_for(cpu, "cpu", ADD, environ={"XLA_FLAGS": f"--xla_dump_to={tmp_path}"})
    cpu.compile(request)
    assert list(tmp_path.glob("*add*")), "XLA dumps where the flag says"


def test_an_unknown_flag_costs_its_program_only(fresh: Compiler) -> None:
    bad = request_for(fresh, "cpu", ADD, environ={"XLA_FLAGS": "--xla_no_such_flag=1"})
    with pytest.raises(CompilerCrashed, match=r"Unknown flag in XLA_FLAGS: --xla_no_such_flag=1$"):
        fresh.compile(bad)
    assert fresh.compile(request_for(fresh, "cpu", ADD)).executable


@pytest.mark.parametrize(
    "program",
    [b"", b"hello", b"ML\xefR", b"ML\xefR\x01garbage", os.urandom(1000), ADD.replace("main", "other").encode()],
    ids=["empty", "word", "magic", "garbage", "random", "no-main"],
)
def test_what_is_no_program_is_refused_in_one_sentence(cpu: Compiler, program: bytes) -> None:
    with pytest.raises(CompileError, match=r"^XLA refused the program: [^\n]+$") as caught:
        cpu.compile(request_for(cpu, "cpu", program))
    assert type(caught.value) is CompileError, "the child lives on"


def test_a_cut_program_is_refused(cpu: Compiler, corpus: Path) -> None:
    program = (corpus / "torch_mlp_inf.mlirbc").read_bytes()
    for size in range(10, len(program), len(program) // 8):
        with pytest.raises(CompileError):
            cpu.compile(request_for(cpu, "cpu", program[:size]))


@pytest.mark.parametrize("malformed", [length_field(1, b"\x01"), length_field(3, length_field(3, b"\x01"))])
def test_options_with_a_malformed_field_are_refused_whatever_stands_before_it(cpu: Compiler, malformed: bytes) -> None:
    """jaxlib reads up to there in silence, so the order of the fields would decide what is compiled."""
    request = request_for(cpu, "cpu", ADD)
    for options in (request.options + malformed, malformed + request.options):
        with pytest.raises(CompileError, match="malformed"):
            cpu.compile(dataclasses.replace(request, options=options))


def test_options_that_are_no_message_are_refused(cpu: Compiler) -> None:
    request = dataclasses.replace(request_for(cpu, "cpu", ADD), options=b"\xff\xff")
    for action in (cpu.compile, lambda broken: cpu.load(b"", broken)):
        with pytest.raises(InvalidRequest, match="CompileOptionsProto"):
            action(request)


@pytest.mark.parametrize("executable", [b"", b"garbage", bytes(5000)])
def test_what_is_no_executable_is_blamed(cpu: Compiler, executable: bytes) -> None:
    with pytest.raises(LoadError, match=r"^XLA could not load the executable: [^\n]+$") as caught:
        cpu.load(executable, request_for(cpu, "cpu", ADD))
    assert caught.value.blames_entry


def test_an_executable_for_other_devices_is_blamed(cpu: Compiler) -> None:
    one, two = request_for(cpu, "cpu", ADD), request_for(cpu, "cpu", ADD, num_replicas=2)
    for made_for, asked_for in ((one, two), (two, one)):
        with pytest.raises(LoadError, match="for other devices") as caught:
            cpu.load(cpu.compile(made_for).executable, asked_for)
        assert caught.value.blames_entry


@pytest.mark.parametrize("part", ["compiler", "cpu_features", "cpu_name"])
def test_an_executable_for_another_target_is_not_touched(cpu: Compiler, part: str) -> None:
    request = request_for(cpu, "cpu", ADD)
    other = Target.of("cpu", {**dict(request.target.parts), part: "other"}, position_independent=True)
    with pytest.raises(LoadError, match=f"another target: {part} differ") as caught:
        cpu.load(b"never read", dataclasses.replace(request, target=other))
    assert not caught.value.blames_entry


def test_an_executable_of_another_environment_is_not_loaded(cpu: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for(cpu, "cpu", ADD)
    executable = cpu.compile(request).executable
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with pytest.raises(Bypass, match="environment_changed"):
        cpu.load(executable, request)


def test_a_target_without_identity_is_compiled_for_and_loaded(cpu: Compiler) -> None:
    known = request_for(cpu, "cpu", ADD)
    request = dataclasses.replace(known, target=Target.without_identity("cpu", "no cpuinfo"))
    assert cpu.load(cpu.compile(request).executable, request).execute([FOUR, FOUR])[0].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    "inputs", [[FOUR], [FOUR, FOUR[:2]], [FOUR, FOUR.astype(numpy.float64)]], ids=["number", "shape", "dtype"]
)
def test_inputs_that_do_not_fit_are_refused(cpu: Compiler, inputs: list[numpy.ndarray]) -> None:
    request = request_for(cpu, "cpu", ADD)
    loaded = cpu.load(cpu.compile(request).executable, request)
    with pytest.raises(ValueError, match=r"takes 2 arrays|input 1 is"):
        loaded.execute(inputs)


def test_wide_inputs_are_not_narrowed(cpu: Compiler) -> None:
    request = request_for(cpu, "cpu", ADD.replace("f32", "i64"))
    loaded = cpu.load(cpu.compile(request).executable, request)
    wide = numpy.full(4, 1 << 40)
    [output] = loaded.execute([wide, wide])
    assert output.dtype == numpy.int64
    assert output.tolist() == [1 << 41] * 4
