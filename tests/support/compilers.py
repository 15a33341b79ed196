"""Requests to real compilers, and small programs for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from torchtpu_cache.compilers.base import Compiler
from torchtpu_cache.compilers.registry import compiler_for, targets_here
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.canonical.wire import length_field, varint_field
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.request import Request


def new_compiler(kind: str, memo_dir: Path, *, pool_size: int = 1) -> Compiler:
    [here] = [found for found in targets_here() if found.kind == kind]
    if not here.usable:
        pytest.skip(here.problem)
    return compiler_for(here.targets[0], identities=FileIdentities(memo_dir), memo_dir=memo_dir, pool_size=pool_size)


def request_for(
    compiler: Compiler,
    target_name: str,
    program: bytes | str,
    *,
    options: bytes | None = None,
    environ: Mapping[str, str] | None = None,
    **shape: int,
) -> Request:
    """A request in this process's environment, or in `environ`; `shape` is num_replicas and num_partitions."""
    environment = Environment.snapshot(os.environ if environ is None else environ, ())
    if options is None:
        options = encode_options(**shape, use_spmd_partitioning=shape.get("num_partitions", 1) > 1)
    return Request(
        program=program.encode() if isinstance(program, str) else program,
        options=options,
        target=compiler.describe(target_name, options, environment),
        environment=environment,
        executable_format=compiler.executable_format,
    )


ADD = """
module @add {
  func.func public @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %a, %b : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
"""Two arrays of four, one device."""

SUM_OF_REPLICAS = """
module @sum attributes {mhlo.num_replicas = 2 : i32} {
  func.func public @main(%a: tensor<4xf32>) -> tensor<4xf32> {
    %0 = "stablehlo.all_reduce"(%a) ({
    ^bb0(%x: tensor<f32>, %y: tensor<f32>):
      %1 = stablehlo.add %x, %y : tensor<f32>
      stablehlo.return %1 : tensor<f32>
    }) {replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""
"""One array of four, summed over two replicas."""

SUM_OVER_PARTITIONS = """
module @sum attributes {mhlo.num_partitions = 2 : i32} {
  func.func public @main(%a: tensor<8xf32> {mhlo.sharding = "{devices=[2]<=[2]}"})
      -> (tensor<f32> {mhlo.sharding = "{replicated}"}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
}
"""
"""An array of eight, divided over two partitions, summed."""

CHOLESKY = """
module @cholesky {
  func.func public @main(%a: tensor<2x2xf32>) -> tensor<2x2xf32> {
    %0:2 = stablehlo.custom_call @lapack_spotrf_ffi(%a) {
      mhlo.backend_config = {uplo = 76 : ui8},
      operand_layouts = [dense<[0, 1]> : tensor<2xindex>],
      result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<> : tensor<0xindex>]
    } : (tensor<2x2xf32>) -> (tensor<2x2xf32>, tensor<i32>)
    return %0#0 : tensor<2x2xf32>
  }
}
"""
"""Calls LAPACK by name, as programs of jax do."""

SHARDY_SUM = """
module @sum attributes {mhlo.num_partitions = 2 : i32} {
  sdy.mesh @mesh = <["x"=2]>
  func.func public @main(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>})
      -> (tensor<f32> {sdy.sharding = #sdy.sharding<@mesh, []>}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%a init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
}
"""
"""As SUM_OVER_PARTITIONS, in the dialect that jax writes now; needs SHARDY_OPTIONS."""

SHARDY_OPTIONS = length_field(
    3, varint_field(1, -1) + varint_field(4, 1) + varint_field(5, 2) + varint_field(6, 1) + varint_field(19, 1)
)
"""Two partitions, SPMD, the Shardy partitioner."""
