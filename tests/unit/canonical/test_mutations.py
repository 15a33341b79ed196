"""Whatever changes what a program computes changes its identity: real modules, altered through MLIR."""

from __future__ import annotations

from typing import Any

import pytest

MUTATE = """
import json, re, sys
from pathlib import Path
from torchtpu_cache_core.canonical import canonicaliser_child as child

ir, stablehlo = child.ir, child.stablehlo
program = Path(sys.argv[1]).read_bytes()


def operations(module, *names):
    found = []
    def visit(operation):
        if operation.name in names:
            found.append(operation)
        return ir.WalkResult.ADVANCE
    module.operation.walk(visit)
    return found


def names_of(operation):
    return [a if isinstance(a, str) else a.name for a in operation.attributes]


def renamed(operation, name):
    with ir.InsertionPoint(operation), operation.location:
        attributes = {key: operation.attributes[key] for key in names_of(operation)}
        made = ir.Operation.create(name, [r.type for r in operation.results], list(operation.operands), attributes)
    for old, new in zip(operation.results, made.results):
        old.replace_all_uses_with(new)
    operation.erase()


def other_op(module):
    found = operations(module, "stablehlo.add")
    renamed(found[len(found) // 2], "stablehlo.subtract")


def first_op(module):
    renamed(operations(module, "stablehlo.add", "stablehlo.multiply")[0], "stablehlo.maximum")


def operands(module):
    found = [o for o in operations(module, "stablehlo.subtract", "stablehlo.divide") if o.operands[0] != o.operands[1]]
    operation = next(o for o in found if o.operands[0].type == o.operands[1].type)
    left, right = operation.operands[0], operation.operands[1]
    operation.operands[0], operation.operands[1] = right, left


def constant(module):
    for operation in operations(module, "stablehlo.constant"):
        value = ir.DenseElementsAttr(operation.attributes["value"])
        kind = ir.RankedTensorType(operation.results[0].type)
        if value.is_splat and str(kind.element_type) == "f32":
            operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get_f32(0.123456))
            return
    raise LookupError


def constant_by_one_bit(module):
    for operation in operations(module, "stablehlo.constant"):
        value = ir.DenseElementsAttr(operation.attributes["value"])
        kind = ir.RankedTensorType(operation.results[0].type)
        if value.is_splat and str(kind.element_type) == "f32":
            number = ir.FloatAttr(value.get_splat_value()).value
            nearby = ir.FloatAttr.get_f32(number * (1 + 2**-23) if number not in (0.0, float("-inf")) else 1e-45)
            operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, nearby)
            return
    raise LookupError


def main_function(module):
    return next(o for o in operations(module, "func.func") if str(o.attributes["sym_name"]) == '"main"')


def with_argument_attribute(module, name, value):
    function = main_function(module)
    count = len(ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).inputs)
    old = function.attributes["arg_attrs"] if "arg_attrs" in names_of(function) else None
    attributes = [{n.name: n.attr for n in ir.DictAttr(a)} for a in old] if old else [{} for _ in range(count)]
    attributes[0][name] = value
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attributes])


def sharding(module):
    with_argument_attribute(module, "mhlo.sharding", ir.StringAttr.get("{replicated}"))


def other_sharding(module):
    with_argument_attribute(module, "mhlo.sharding", ir.StringAttr.get("{maximal device=0}"))


def donation(module):
    with_argument_attribute(module, "jax.buffer_donor", ir.BoolAttr.get(True))


def partitions(module):
    module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 8)


def precision(module):
    operation = operations(module, "stablehlo.dot_general")[0]
    high = ir.Attribute.parse("[#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]")
    operation.attributes["precision_config"] = high


def call_target(module):
    operation = main_function(module).regions[0].blocks[0].operations[0]
    value = main_function(module).regions[0].blocks[0].arguments[0]
    with ir.InsertionPoint(operation), ir.Location.unknown():
        ir.Operation.create(
            "stablehlo.custom_call", [value.type], [value], {"call_target_name": ir.StringAttr.get("Sharding")}
        )


def deserialised(raw, mutate):
    context = child.context()
    with context:
        module = stablehlo.deserialize_portable_artifact(context, raw)
        if mutate is not None:
            try:
                mutate(module)
            except (LookupError, StopIteration):
                return None
            module.operation.verify()
        return stablehlo.serialize_portable_artifact(module, "1.13.0", True)


found = {"same": child.canonicalise(deserialised(program, None))["sha256"]}
mutations = [
    other_op, first_op, operands, constant, constant_by_one_bit, sharding, other_sharding, donation, partitions,
    precision, call_target,
]
for mutate in mutations:
    raw = deserialised(program, mutate)
    if raw is not None:
        found[mutate.__name__] = child.canonicalise(raw)["sha256"]

context = child.context()
with context:
    text = str(stablehlo.deserialize_portable_artifact(context, program).operation.get_asm(enable_debug_info=False))
for size in sorted({int(n) for n in re.findall(r"(?<=[<x])([0-9]+)(?=x)", text)}, reverse=True):
    altered = re.sub(rf"(?<=[<x]){size}(?=x)", str(size + 1), text)
    answer = child.canonicalise(altered.encode())
    if "sha256" in answer:
        found["shape"] = answer["sha256"]
        break
print(json.dumps([child.canonicalise(program)["sha256"], found]))
"""


@pytest.mark.parametrize(
    "name", ["jax_mlp4_sgd_step", "jax_tfm2_fwd", "torch_llama2_fwd", "torch_resnet18_bwd", "torchtpu_zoo_0"]
)
def test_changes_count(run_python: Any, corpus: Any, name: str) -> None:
    original, found = run_python(MUTATE, str(corpus / f"{name}.mlirbc"))
    assert found.pop("same") == original
    assert len(found) >= 8, sorted(found)
    assert {"sharding", "donation", "partitions", "call_target", "first_op"} <= found.keys()
    assert original not in found.values()
    assert len(set(found.values())) >= len(found) - 1  # two mutations may happen to be one


def test_shapes_count(run_python: Any, corpus: Any) -> None:
    original, found = run_python(MUTATE, str(corpus / "jax_add.mlirbc"))
    assert found["shape"] != original
