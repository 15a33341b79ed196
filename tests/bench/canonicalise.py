"""Canonicalising a program in the warm helper process, against jaxlib's own work on it.

Way: `ChildProcess.call` of a helper that runs already: the program's bytes go to it, it parses them, strips debug info,
looks at every operation for custom calls, writes the portable artifact and hashes it, and the answer comes back. Floor:
parse, strip and portable write by jaxlib's bindings in this process, in a context of its own as the helper's is (made,
and taken down with the module, inside the clock). The helper makes its next context, and takes the last one down, while
nobody waits; each is asked again only after it has rested. `floor_in_a_context` leaves the context out: how long the
floor takes once it is there. Rounds are interleaved; medians are compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench._hits import module
from support.clean import clean_folder
from support.figures import Figure, Size
from support.rounds import Taken, interleaved, taken_by

BAR = 1.2
SHORT = ("jax_add", "torch_llama2_fwd")
FULL = (
    *SHORT,
    "torchtpu_zoo_0",
    "torch_resnet18_fwd",
    "jax_tfm6_adamw_step",
    "jax_tfm12_adamw_step",
    "jax_tfm24_adamw_step",
)


def run(size: Size) -> Iterator[Figure]:
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import stablehlo

    from torchtpu_cache_core.canonical.canonicaliser_child import context
    from torchtpu_cache_core.canonical.forms import PORTABLE_VERSION
    from torchtpu_cache_core.canonical.program import helper_process

    def by_hand(raw: bytes, inside: ir.Context) -> None:
        with inside:
            parsed = stablehlo.deserialize_portable_artifact(inside, raw)
            passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(parsed.operation)
            stablehlo.serialize_portable_artifact(parsed, PORTABLE_VERSION, True)

    def floor_in_a_context(raw: bytes) -> Taken:
        inside = context()
        return taken_by(lambda: by_hand(raw, inside))

    def child(raw: bytes) -> Taken:
        time.sleep(0.05)  # what it does while nobody waits takes less
        return Taken(taken_by(lambda: helper.call({}, raw, deadline_seconds=60)).seconds)  # its work is another's

    with clean_folder():
        helper = helper_process()
        try:
            for name in SHORT if size is Size.SHORT else FULL:
                raw = module(name)
                measured = interleaved(
                    size.of(short=5, full=15),
                    {
                        "floor": lambda raw=raw: taken_by(lambda: by_hand(raw, context())),
                        "floor_in_a_context": lambda raw=raw: floor_in_a_context(raw),
                        "child": lambda raw=raw: child(raw),
                    },
                )
                ratio = measured.ratio("child", "floor")
                bare = measured.ratio("child", "floor_in_a_context")
                shown = measured.told("child", "floor", "floor_in_a_context")
                more = {**shown, "program_bytes": len(raw), "ratio_in_a_context": round(bare, 3)}
                yield Figure.at_most(f"canonicalise.{name}", ratio, "ratio", BAR, **more)
        finally:
            helper.close()
