"""Real modules, changed through MLIR in a process of its own, because only jaxlib's bindings can.

    python -m support.pairs.mlir_mutations SEED COUNT MODULE...

Writes frames to standard output: a JSON line with module, kind, whether the program is still the same and the length,
then the program's bytes. Each module comes once as it is (`original`), then in turn COUNT ways that must not matter and
changes that must.

What must not matter: the form (text or bytecode, with locations or without), the places and names in the locations, and
the module's symbol. A change that must is a different operation, operand, constant, attribute, result, signature or
partitioning; the module still verifies. Swapped operands are only ever those of operations that do not commute.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jaxlib.mlir.dialects.stablehlo as stablehlo
from jaxlib.mlir import ir

from torchtpu_cache_core.canonical.canonicaliser_child import context as make_context

_CLASSES: Final = (
    ("add", "subtract", "multiply", "maximum", "minimum"),
    ("exponential", "tanh", "negate", "abs"),
    ("and", "or", "xor"),
)
_NOT_COMMUTATIVE: Final = ("stablehlo.subtract", "stablehlo.divide", "stablehlo.power", "stablehlo.compare")
_ATTEMPTS: Final = 10
"""Most other numbers make no program."""

_PLACE: Final = re.compile(r'"[^"\n]*\.py":\d+:\d+(?: to (?:\d+)?:\d+)?|"[^"\n]*":\d+:\d+(?: to (?:\d+)?:\d+)?')


class Module:
    """One module, parsed anew for every change, which works in place."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.name = path.stem
        self.raw = path.read_bytes()
        self.rng = rng

    def frames(self, count: int) -> Iterator[tuple[str, bool, bytes]]:
        """Kind, whether it is the same program, and its bytes."""
        yield "original", True, self.raw
        changes: list[Callable[[ir.Module], None]] = [
            *(self._other_operation, self._swapped_operands, self._other_operand, self._constant, self._constant_bit),
            *(self._attribute, self._result, self._argument_attribute, self._module_attribute, self._operation_added),
        ]
        for number in range(count):
            kind, raw = self._written_otherwise()
            yield kind, True, raw
            change = changes[number % len(changes)]
            changed = self._changed(change)
            if changed is not None:
                yield change.__name__.strip("_").replace("_", " "), False, changed

    # ---- the same program --------------------------------------------------------------------------------------------

    def _written_otherwise(self) -> tuple[str, bytes]:
        kind = self.rng.choice(("text", "generic text", "bytecode", "other places", "other symbol", "no places"))
        with make_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, self.raw)
            operation = module.operation
            match kind:
                case "text":
                    return kind, str(operation.get_asm(enable_debug_info=self.rng.random() < 0.5)).encode()
                case "generic text":
                    return kind, str(operation.get_asm(print_generic_op_form=True)).encode()
                case "other places":
                    text = str(operation.get_asm(enable_debug_info=True))
                    moved = ir.Module.parse(_PLACE.sub(self._place, text) + "\n" * self.rng.randint(0, 9))
                    return kind, _bytecode(moved)
                case "other symbol":
                    name = self.rng.choice(("jit_step", "SyncTensorsGraph.12", "main", "a b"))
                    operation.attributes["sym_name"] = ir.StringAttr.get(name)
                case "no places":
                    # Parsed from text without any, each operation gets its line in that text.
                    text = "// made anew\n" * self.rng.randint(0, 9) + str(operation.get_asm(enable_debug_info=False))
                    return kind, _bytecode(ir.Module.parse(text))
            return kind, _bytecode(module)

    def _place(self, _: re.Match[str]) -> str:
        rng = self.rng
        return f'"/home/u{rng.randrange(99)}/{rng.randrange(99)}.py":{rng.randint(1, 999)}:{rng.randint(1, 99)}'

    # ---- another program ---------------------------------------------------------------------------------------------

    def _changed(self, change: Callable[[ir.Module], None]) -> bytes | None:
        """The module after a change; None where it has no place for it, or is none any more."""
        with make_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, self.raw)
            try:
                change(module)
                if not module.operation.verify():
                    return None
            except (LookupError, ValueError, ir.MLIRError):
                return None
            return _bytecode(module)

    def _pick(self, module: ir.Module, fits: Callable[[ir.Operation], bool]) -> ir.Operation:
        found: list[ir.Operation] = []

        def visit(operation: ir.Operation) -> ir.WalkResult:
            if fits(operation):
                found.append(operation)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        return self.rng.choice(found)  # IndexError, a LookupError, where there is none

    def _other_operation(self, module: ir.Module) -> None:
        names = self.rng.choice(_CLASSES)
        operation = self._pick(module, lambda each: each.name.removeprefix("stablehlo.") in names)
        name = self.rng.choice([each for each in names if f"stablehlo.{each}" != operation.name])
        with ir.InsertionPoint(operation), operation.location:
            attributes = {key: operation.attributes[key] for key in _attribute_names(operation)}
            kinds = [result.type for result in operation.results]
            made = ir.Operation.create(f"stablehlo.{name}", kinds, list(operation.operands), attributes)
        for old, new in zip(operation.results, made.results, strict=True):
            old.replace_all_uses_with(new)
        operation.erase()

    def _swapped_operands(self, module: ir.Module) -> None:
        def fits(each: ir.Operation) -> bool:
            return (
                each.name in _NOT_COMMUTATIVE
                and each.operands[0] != each.operands[1]
                and each.operands[0].type == each.operands[1].type
            )

        operation = self._pick(module, fits)
        if operation.name == "stablehlo.compare" and re.search(r"<?\b(EQ|NE)\b", str(operation)):
            raise LookupError
        left, right = operation.operands[0], operation.operands[1]
        operation.operands[0], operation.operands[1] = right, left

    def _other_operand(self, module: ir.Module) -> None:
        """An argument of the same block and type, in place of another value."""

        def fits(each: ir.Operation) -> bool:
            return each.name.startswith("stablehlo.") and len(each.operands) > 0 and each.parent is not None

        operation = self._pick(module, fits)
        at = self.rng.randrange(len(operation.operands))
        old = operation.operands[at]
        arguments = [each for each in operation.block.arguments if each.type == old.type and each != old]
        operation.operands[at] = self.rng.choice(arguments)

    def _float_constant(self, module: ir.Module) -> tuple[ir.Operation, ir.RankedTensorType, float]:
        def fits(each: ir.Operation) -> bool:
            if each.name != "stablehlo.constant" or not isinstance(each.results[0].type, ir.RankedTensorType):
                return False
            value = each.attributes["value"]
            kind = ir.RankedTensorType(each.results[0].type)
            return isinstance(value, ir.DenseElementsAttr) and value.is_splat and str(kind.element_type) == "f32"

        operation = self._pick(module, fits)
        value = ir.DenseElementsAttr(operation.attributes["value"])
        return operation, ir.RankedTensorType(operation.results[0].type), ir.FloatAttr(value.get_splat_value()).value

    def _constant(self, module: ir.Module) -> None:
        operation, kind, old = self._float_constant(module)
        new = ir.FloatAttr.get_f32(self.rng.choice((0.123456, -3.5, 1e30, 7e-42)))
        if new.value == old:
            raise LookupError
        operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, new)

    def _constant_bit(self, module: ir.Module) -> None:
        """The nearest other float."""
        operation, kind, old = self._float_constant(module)
        if old != old or abs(old) == float("inf"):
            raise LookupError
        new = ir.FloatAttr.get_f32(old * (1 + 2**-23) if old != 0.0 else 1e-45)
        operation.attributes["value"] = ir.DenseElementsAttr.get_splat(kind, new)

    def _attribute(self, module: ir.Module) -> None:
        """A number, switch or list of numbers that an operation says of itself."""
        kinds = (ir.IntegerAttr, ir.BoolAttr, ir.DenseI64ArrayAttr, ir.DenseBoolArrayAttr)

        def fits(each: ir.Operation) -> bool:
            named = each.name.startswith("stablehlo.")
            return named and any(isinstance(each.attributes[name], kinds) for name in _attribute_names(each))

        for _ in range(_ATTEMPTS):
            operation = self._pick(module, fits)
            names = [name for name in _attribute_names(operation) if isinstance(operation.attributes[name], kinds)]
            name = self.rng.choice(names)
            old = operation.attributes[name]
            with contextlib.suppress(LookupError, ValueError, ir.MLIRError):
                operation.attributes[name] = self._other_attribute(old)
                if operation.verify():
                    return
            operation.attributes[name] = old
        raise LookupError

    def _other_attribute(self, old: Any) -> Any:
        if isinstance(old, ir.BoolAttr):
            return ir.BoolAttr.get(not old.value)
        if isinstance(old, ir.IntegerAttr):
            return ir.IntegerAttr.get(old.type, old.value + self.rng.choice((-1, 1)))
        values = list(old)
        at = self.rng.randrange(len(values))  # ValueError where it is empty
        if isinstance(old, ir.DenseBoolArrayAttr):
            values[at] = not values[at]
            return ir.DenseBoolArrayAttr.get(values)
        if len(set(values)) > 1 and self.rng.random() < 0.5:
            values[at], values[at - 1] = values[at - 1], values[at]
        else:
            values[at] += self.rng.choice((-1, 1))
        if values == list(old):
            raise LookupError
        return ir.DenseI64ArrayAttr.get(values)

    def _result(self, module: ir.Module) -> None:
        operation = self._pick(module, lambda each: each.name == "func.return" and len(each.operands) > 0)
        at = self.rng.randrange(len(operation.operands))
        old = operation.operands[at]
        arguments = [each for each in operation.block.arguments if each.type == old.type and each != old]
        operation.operands[at] = self.rng.choice(arguments)

    def _argument_attribute(self, module: ir.Module) -> None:
        """Sharding or donation of an argument of the main function."""
        function = self._pick(
            module, lambda each: each.name == "func.func" and '"main"' in str(each.attributes["sym_name"])
        )
        count = len(ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value).inputs)
        old = function.attributes["arg_attrs"] if "arg_attrs" in _attribute_names(function) else None
        attributes: list[dict[str, Any]] = [{} for _ in range(count)]
        if old is not None:
            attributes = [{item.name: item.attr for item in ir.DictAttr(each)} for each in ir.ArrayAttr(old)]
        at, (name, value) = self.rng.randrange(count), self.rng.choice(_ARGUMENT_ATTRIBUTES)
        made = value()
        if str(attributes[at].get(name)) == str(made):
            raise LookupError
        attributes[at][name] = made
        function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in attributes])

    def _module_attribute(self, module: ir.Module) -> None:
        name = self.rng.choice(("mhlo.num_partitions", "mhlo.num_replicas"))
        made = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), self.rng.choice((2, 3, 8, 16)))
        attributes = module.operation.attributes
        if name in attributes and attributes[name] == made:
            raise LookupError
        attributes[name] = made

    def _operation_added(self, module: ir.Module) -> None:
        """A square root of the first result, which is returned in its place."""
        operation = self._pick(module, lambda each: each.name == "func.return" and len(each.operands) > 0)
        old = operation.operands[0]
        with ir.InsertionPoint(operation), ir.Location.unknown():
            made = ir.Operation.create("stablehlo.sqrt", [old.type], [old])
        operation.operands[0] = made.results[0]


_ARGUMENT_ATTRIBUTES: Final = (
    ("mhlo.sharding", lambda: ir.StringAttr.get("{replicated}")),
    ("mhlo.sharding", lambda: ir.StringAttr.get("{maximal device=0}")),
    ("jax.buffer_donor", lambda: ir.BoolAttr.get(True)),
)


def _attribute_names(operation: ir.Operation) -> list[str]:
    return [each if isinstance(each, str) else each.name for each in operation.attributes]


def _bytecode(module: ir.Module) -> bytes:
    raw = io.BytesIO()
    module.operation.write_bytecode(raw)
    return raw.getvalue()


def main(seed: int, count: int, paths: list[Path]) -> None:
    """Writes the frames of all modules."""
    for path in paths:
        for kind, same, raw in Module(path, random.Random(f"{seed} {path.name}")).frames(count):
            told = {"module": path.name, "kind": kind, "same": same, "length": len(raw)}
            sys.stdout.buffer.write(json.dumps(told).encode() + b"\n" + raw)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
