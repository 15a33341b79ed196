"""StableHLO programs made by hand: what they compute is known, and written as text in any of the ways that must not
matter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

_TYPE: Final = "tensor<4x4xf32>"
_BINARY: Final = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "atan2", "remainder")
_UNARY: Final = (
    "negate",
    "abs",
    "exponential",
    "log",
    "tanh",
    "sine",
    "cosine",
    "sqrt",
    "rsqrt",
    "floor",
    "ceil",
    "sign",
)
_COMPARE: Final = ("LT", "GT", "LE", "GE", "EQ", "NE")
_PRECISION: Final = ("DEFAULT", "HIGH", "HIGHEST")
_SHARDINGS: Final = ("{replicated}", "{devices=[2,2]<=[4]}", "{maximal device=0}")


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: its kind, what it reads (arguments come first, then nodes in order), and what else it says."""

    kind: str
    reads: tuple[int, ...]
    says: str = ""


@dataclass(frozen=True, slots=True)
class HandMade:
    """A program over values of one type.

    Args:
        arguments: how many.
        result: which value is returned.
        partitions: of the module.
    """

    arguments: int
    nodes: tuple[Node, ...]
    result: int
    partitions: int = 1


def make(rng: random.Random) -> HandMade:
    """Any program, of two to eight operations."""
    arguments = rng.randint(1, 3)
    nodes: list[Node] = []
    for number in range(rng.randint(2, 8)):
        nodes.append(_node(rng, arguments + number))
    return HandMade(arguments, tuple(nodes), arguments + len(nodes) - 1, rng.choice((1, 1, 4)))


def _node(rng: random.Random, known: int) -> Node:
    kind = rng.choice(("binary", "binary", "unary", "constant", "transpose", "reverse", "select", "dot", "sharding"))
    reads = tuple(rng.randrange(known) for _ in range({"constant": 0, "binary": 2, "dot": 2, "select": 2}.get(kind, 1)))
    return Node(kind, reads, _SAYS[kind](rng))


_SAYS: Final[dict[str, Callable[[random.Random], str]]] = {
    "binary": lambda rng: rng.choice(_BINARY),
    "unary": lambda rng: rng.choice(_UNARY),
    "constant": lambda rng: f"{rng.choice((0.0, -0.0, 0.5, 1.0, 1.0000001, 3.25, -7.5, 1e-30)):.9e}",
    "transpose": lambda rng: rng.choice(("0, 1", "1, 0")),
    "reverse": lambda rng: rng.choice(("0", "1", "0, 1")),
    "select": lambda rng: rng.choice(_COMPARE),
    "dot": lambda rng: rng.choice(_PRECISION),
    "sharding": lambda rng: rng.choice(_SHARDINGS),
}


def change(program: HandMade, rng: random.Random) -> tuple[str, HandMade]:
    """What was changed, and another program: it says or reads something else in one place."""
    kind = rng.choice(("operation or attribute", "operand", "result", "argument", "partitions", "operation added"))
    nodes = [*program.nodes]
    at = rng.randrange(len(nodes))
    match kind:
        case "operation or attribute":
            nodes[at] = replace(nodes[at], says=_SAYS[nodes[at].kind](rng))
        case "operand" if nodes[at].reads:
            reads = [*nodes[at].reads]
            reads[rng.randrange(len(reads))] = rng.randrange(program.arguments + at)
            nodes[at] = replace(nodes[at], reads=tuple(reads))
        case "operation added":
            nodes.append(_node(rng, program.arguments + len(nodes)))
            return kind, replace(program, nodes=tuple(nodes), result=program.arguments + len(nodes) - 1)
        case "result":
            return kind, replace(program, result=rng.randrange(program.arguments + len(nodes)))
        case "partitions":
            return kind, replace(program, partitions=rng.choice((1, 2, 4, 8)))
        case "argument":
            reads_of = [replace(n, reads=tuple(r + (r >= program.arguments) for r in n.reads)) for n in nodes]
            result = program.result + (program.result >= program.arguments)
            return kind, replace(program, arguments=program.arguments + 1, nodes=tuple(reads_of), result=result)
    return kind, replace(program, nodes=tuple(nodes))


def write(program: HandMade, rng: random.Random, *, plainly: bool = False) -> bytes:
    """The program as MLIR text; not `plainly`, with names, blanks, comments and places at random."""
    return _Text(program, rng, plainly).write().encode()


class _Text:
    def __init__(self, program: HandMade, rng: random.Random, plainly: bool) -> None:
        self._program = program
        self._rng = rng
        self._plainly = plainly
        total = program.arguments + len(program.nodes)
        stems = ["v" if plainly else rng.choice(("x", "tmp_", "_", "Arg", "r.", "a$")) for _ in range(total)]
        self._names = [f"%{stem}{number}" for number, stem in enumerate(stems)]
        self._lines: list[str] = []

    def write(self) -> str:
        program, rng = self._program, self._rng
        for number, node in enumerate(program.nodes):
            self._operation(self._names[program.arguments + number], node)
        self._line(f"return {self._names[program.result]} : {_TYPE}")
        arguments = ", ".join(f"{name}: {_TYPE}" for name in self._names[: program.arguments])
        name = "m" if self._plainly else rng.choice(("jit_step", "SyncTensorsGraph.7", '"a b"', "main_2", "_"))
        partitions = f"attributes {{mhlo.num_partitions = {program.partitions} : i32}}"
        head = f"module @{name} {partitions} {{\n  func.func public @main({arguments}) -> {_TYPE} {{\n"
        return head + "".join(self._lines) + "  }" + self._place() + "\n}" + self._place() + "\n"

    def _operation(self, name: str, node: Node) -> None:
        reads = [self._names[each] for each in node.reads]
        says = node.says
        match node.kind:
            case "binary" if not self._plainly and self._rng.random() < 0.3:
                self._line(f'{name} = "stablehlo.{says}"({", ".join(reads)}) : ({_TYPE}, {_TYPE}) -> {_TYPE}')
            case "binary" | "unary":
                self._line(f"{name} = stablehlo.{says} {', '.join(reads)} : {_TYPE}")
            case "constant":
                self._line(f"{name} = stablehlo.constant dense<{says}> : {_TYPE}")
            case "transpose":
                self._line(f"{name} = stablehlo.transpose {reads[0]}, dims = [{says}] : ({_TYPE}) -> {_TYPE}")
            case "reverse":
                self._line(f"{name} = stablehlo.reverse {reads[0]}, dims = [{says}] : {_TYPE}")
            case "select":
                kind = f"(tensor<4x4xf32>, {_TYPE}) -> tensor<4x4xi1>"
                self._line(f"{name}p = stablehlo.compare {says}, {reads[0]}, {reads[1]} : {kind}")
                self._line(f"{name} = stablehlo.select {name}p, {reads[0]}, {reads[1]} : tensor<4x4xi1>, {_TYPE}")
            case "dot":
                precision = f"contracting_dims = [1] x [0], precision = [{says}, {says}]"
                kind = f"({_TYPE}, {_TYPE}) -> {_TYPE}"
                self._line(f"{name} = stablehlo.dot_general {reads[0]}, {reads[1]}, {precision} : {kind}")
            case "sharding":
                call = f'stablehlo.custom_call @Sharding({reads[0]}) {{mhlo.sharding = "{says}"}}'
                self._line(f"{name} = {call} : ({_TYPE}) -> {_TYPE}")

    def _line(self, text: str) -> None:
        if self._plainly:
            self._lines.append(f"    {text}\n")
            return
        rng = self._rng
        for _ in range(rng.choice((0, 0, 0, 1))):
            self._lines.append(rng.choice(("\n", "  // line 7 of model.py\n", "\t\n")))
        indent = rng.choice(("", "    ", "\t", "  \n    "))
        self._lines.append(f"{indent}{text}{self._place()}\n")

    def _place(self) -> str:
        """Where in somebody's source it came from."""
        if self._plainly or self._rng.random() < 0.4:
            return ""
        rng = self._rng
        path = f"/home/{rng.choice(('ada', 'bob'))}/model_{rng.randrange(9)}.py"
        file = f'"{path}":{rng.randint(1, 999)}:{rng.randint(1, 80)}'
        return rng.choice(
            (
                f" loc({file})",
                f' loc("jit(step)/layer_{rng.randrange(9)}"({file}))',
                f" loc(callsite({file} at {file}))",
                f" loc(fused[{file}, {file}])",
                " loc(unknown)",
            )
        )
