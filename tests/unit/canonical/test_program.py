"""Programs to identities, through the real canonicaliser in its real process."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from torchtpu_cache_core.canonical.alias import AliasStore
from torchtpu_cache_core.canonical.program import MAX_PROGRAM_BYTES, REST_SECONDS, ProgramCanonicaliser
from torchtpu_cache_core.child import ChildDied
from torchtpu_cache_core.errors import Bypass, ConfigError
from torchtpu_cache_core.identity import FileIdentities

MODULE = """module @{name} attributes {{mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 2 : i32}} {{
  func.func public @main(%a: tensor<2xf32>) -> tensor<2xf32> {{
    {body}
    return %r : tensor<2xf32>
  }}
}}
"""
ADD = "%r = stablehlo.add %a, %a : tensor<2xf32>"


def module(body: str = ADD, name: str = "m") -> bytes:
    return MODULE.format(body=body, name=name).encode()


def call(target: str) -> str:
    return f"%r = stablehlo.custom_call @{target}(%a) : (tensor<2xf32>) -> tensor<2xf32>"


def send(channel_type: int, host: str) -> str:
    channel = f"channel_handle = #stablehlo.channel_handle<handle = 1, type = {channel_type}>"
    return (
        '%t = "stablehlo.create_token"() : () -> !stablehlo.token\n'
        f'    %u = "stablehlo.send"(%a, %t) {{{channel}, {host}}}'
        " : (tensor<2xf32>, !stablehlo.token) -> !stablehlo.token\n    "
    )


def reason(resolver: ProgramCanonicaliser, program: bytes) -> str:
    with pytest.raises(Bypass) as caught:
        resolver.facts(program)
    return caught.value.reason


def test_the_corpus_has_one_identity_for_each_program(canonicaliser: ProgramCanonicaliser, modules: list[Path]) -> None:
    found = {path.name: canonicaliser.facts(path.read_bytes()) for path in modules}
    assert {facts.identity.form for facts in found.values()} == {"portable-1.13.0"}
    assert found["jax_tfm24_adamw_step.mlir"] == found["jax_tfm24_adamw_step.mlirbc"]
    assert len({facts.identity.sha256 for facts in found.values()}) == len(modules) - 1
    assert found["jax_add.mlirbc"].num_partitions == 1


def test_facts(canonicaliser: ProgramCanonicaliser) -> None:
    facts = canonicaliser.facts(module(call("Sharding")))
    assert (facts.num_replicas, facts.num_partitions, facts.custom_calls) == (2, 4, ("Sharding",))
    assert canonicaliser.resolve(module(call("Sharding"))) == facts.identity


@pytest.mark.parametrize("name", ["cpu_sin", "cpu_cos"])
def test_python_callbacks_of_jax_bypass(canonicaliser: ProgramCanonicaliser, corpus: Path, name: str) -> None:
    assert reason(canonicaliser, (corpus / "callbacks" / f"{name}.mlir").read_bytes()) == "host_callback"


def test_two_callbacks_of_jax_look_the_same(corpus: Path) -> None:
    """Why they are never cached."""
    sin, cos = ((corpus / "callbacks" / f"cpu_{name}.mlir").read_text() for name in ("sin", "cos"))
    assert sin == cos


def test_names_and_places_have_no_meaning(canonicaliser: ProgramCanonicaliser) -> None:
    moved = module(ADD + ' loc("/home/ada/model.py":7:3)', name="jit_step")
    assert canonicaliser.resolve(moved) == canonicaliser.resolve(module())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (call("xla_ffi_python_cpu_callback"), "host_callback"),
        (call("xla_ffi_partitioned_python_cpu_callback"), "host_callback"),
        (call("my_kernel"), "custom_call_unlisted"),
        (send(2, "is_host_transfer = true") + ADD, "host_callback"),
        (send(2, "is_host_transfer = false") + ADD, "unparsed_custom_call"),
        (send(1, "is_host_transfer = true") + ADD, "unparsed_custom_call"),
        (
            '%t = "stablehlo.create_token"() : () -> !stablehlo.token\n'
            '    %r, %u = "stablehlo.recv"(%t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 3>,'
            " is_host_transfer = true} : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)",
            "host_callback",
        ),
        (
            "%p = stablehlo.constant dense<true> : tensor<i1>\n"
            '    %r = "stablehlo.if"(%p) ({\n'
            "      %x = stablehlo.custom_call @hidden(%a) : (tensor<2xf32>) -> tensor<2xf32>\n"
            "      stablehlo.return %x : tensor<2xf32>\n    }, {\n      stablehlo.return %a : tensor<2xf32>\n"
            "    }) : (tensor<i1>) -> tensor<2xf32>",
            "custom_call_unlisted",
        ),
        ("%c = arith.constant 1 : i1\n    cf.assert %c, \"no\"\n    " + ADD, "custom_call_unlisted"),
    ],
)  # fmt: skip
def test_bypass(canonicaliser: ProgramCanonicaliser, body: str, expected: str) -> None:
    assert reason(canonicaliser, module(body)) == expected


def test_a_transfer_between_devices_is_no_callback(canonicaliser: ProgramCanonicaliser) -> None:
    assert canonicaliser.facts(module(send(1, "is_host_transfer = false") + ADD)).custom_calls == ()


def test_unparsed_programs(canonicaliser: ProgramCanonicaliser, modules: list[Path]) -> None:
    assert canonicaliser.resolve(module("%r = stablehlo.add %a")).form == "raw"
    assert reason(canonicaliser, b"HloModule m") == "unscannable"
    assert reason(canonicaliser, module("%r = stablehlo.custom_call @Sharding(%a)")) == "unparsed_custom_call"
    assert reason(canonicaliser, modules[0].read_bytes()[:200]) == "unscannable"


def test_an_operator_may_allow_a_target(tmp_path: Path) -> None:
    aliases = AliasStore(tmp_path)
    strict = ProgramCanonicaliser(aliases)
    lenient = ProgramCanonicaliser(aliases, allowed_custom_calls=["my_kernel"])
    try:
        assert reason(strict, module(call("my_kernel"))) == "custom_call_unlisted"
        assert lenient.facts(module(call("my_kernel"))).custom_calls == ("my_kernel",)
        assert reason(strict, module(call("my_kernel"))) == "custom_call_unlisted"
    finally:
        strict.close()
        lenient.close()
    with pytest.raises(ConfigError):
        ProgramCanonicaliser(None, allowed_custom_calls=["xla_python_cpu_callback"])


def test_verdicts_are_remembered_over_processes(tmp_path: Path) -> None:
    """A second resolver answers from aliases alone, good and bad verdicts alike: its child never starts."""
    programs = [module(), module(call("my_kernel")), b"HloModule m"]

    def answers() -> list[Any]:
        resolver = ProgramCanonicaliser(AliasStore(tmp_path / "a"), identities=FileIdentities(tmp_path / "i"))
        found: list[Any] = []
        for program in programs:
            try:
                found.append(resolver.facts(program))
            except Bypass as bypass:
                found.append((bypass.reason, bypass.detail))
        found.append(resolver.child_pid is not None)
        resolver.close()
        return found

    first, second = answers(), answers()
    assert first[:-1] == second[:-1]
    assert (first[-1], second[-1]) == (True, False)
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file():
            path.write_bytes(b"garbage")
    third = answers()
    assert (third[:-1], third[-1]) == (first[:-1], True)


def test_a_program_over_the_limit_bypasses(canonicaliser: ProgramCanonicaliser) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_PROGRAM_BYTES + 1

    assert reason(canonicaliser, Huge()) == "program_too_large"


@pytest.fixture
def aliased(tmp_path: Path) -> Iterator[ProgramCanonicaliser]:
    resolver = ProgramCanonicaliser(AliasStore(tmp_path / "aliases"), deadline_seconds=20)
    yield resolver
    resolver.close()


def test_a_dead_child_is_replaced(aliased: ProgramCanonicaliser) -> None:
    aliased.facts(module())
    pid = aliased.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert aliased.facts(module(name="other")).identity == aliased.facts(module()).identity


class MovedClock:
    """Time that only a test moves."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def time(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds


def test_a_child_that_always_dies_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock()
    resolver = ProgramCanonicaliser(AliasStore(tmp_path / "aliases"), clock=clock)
    asked: list[int] = []

    def dies(*args: object, **more: object) -> NoReturn:
        asked.append(1)
        raise ChildDied("gone", "", None)

    monkeypatch.setattr(resolver._child, "call", dies)
    for i in range(10):
        assert resolver.facts(module(name=f"m{i}")).identity.form == "raw"
    assert len(asked) == 6, "two attempts for each of three programs, then none"
    assert not list((tmp_path / "aliases").rglob("*"))
    monkeypatch.undo()
    clock.seconds += REST_SECONDS
    assert resolver.facts(module(name="m1")).identity.form == "portable-1.13.0"
    resolver.close()


def test_a_hanging_child_is_ended_and_its_program_hashed_raw(tmp_path: Path) -> None:
    clock = MovedClock()
    resolver = ProgramCanonicaliser(AliasStore(tmp_path / "aliases"), clock=clock)
    resolver.facts(module(name="first"))
    pid = resolver.child_pid
    assert pid is not None
    resolver._deadline_seconds = 0.2
    os.kill(pid, signal.SIGSTOP)
    try:
        assert resolver.facts(module()).identity.form == "raw"
        assert not Path(f"/proc/{pid}").exists()
        resolver._deadline_seconds = 60
        assert resolver.facts(module()).identity.form == "raw", "the same program is not tried again at once"
        clock.seconds += REST_SECONDS
        assert resolver.facts(module()).identity.form == "portable-1.13.0", "a timeout says nothing of the program"
    finally:
        resolver.close()


def test_damaged_programs_are_no_error(modules: list[Path]) -> None:
    """Whatever the parser does to itself, the answer is an identity or a bypass."""
    small = [path.read_bytes() for path in modules if path.stat().st_size < 4_000]
    rng = random.Random(7)
    resolver = ProgramCanonicaliser(None, clock=MovedClock())
    resolver._failures = -1000  # never rests
    for _ in range(60):
        raw = bytearray(rng.choice(small))
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        try:
            assert resolver.facts(bytes(raw)).identity.form
        except Bypass as bypass:
            assert bypass.reason in {"unscannable", "unparsed_custom_call", "custom_call_unlisted"}
    assert resolver.facts(module()).identity.form == "portable-1.13.0"
    resolver.close()


def test_a_child_without_memory_is_no_error(tmp_path: Path) -> None:
    resolver = ProgramCanonicaliser(AliasStore(tmp_path / "aliases"), memory_bytes=256 << 20)
    try:
        assert resolver.facts(module()).identity.form == "raw"
        assert not list((tmp_path / "aliases").rglob("*"))
    finally:
        resolver.close()


def test_deep_nesting_is_no_error(aliased: ProgramCanonicaliser) -> None:
    depth = 20_000
    program = b"module {" * depth + b"}" * depth
    try:
        assert aliased.facts(program).identity.form == "raw"
    except Bypass as bypass:
        assert bypass.reason in {"unscannable", "custom_call_unlisted"}
    assert aliased.facts(module()).identity.form == "portable-1.13.0"


def test_many_threads(canonicaliser: ProgramCanonicaliser, modules: list[Path]) -> None:
    small = [path.read_bytes() for path in modules if path.stat().st_size < 10_000]
    expected = [canonicaliser.resolve(raw) for raw in small]
    resolver = ProgramCanonicaliser(None)
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = [resolver.resolve(raw) for raw in small]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    resolver.close()
    assert list(found.values()) == [expected] * 4


WARM = """
import json, sys, time
from pathlib import Path
from torchtpu_cache_core.canonical.alias import AliasStore
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.identity import FileIdentities

folder, program = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
resolver = ProgramCanonicaliser(AliasStore(folder / "a"), identities=FileIdentities(folder / "i"))
started = time.perf_counter()
identity = resolver.resolve(program)
seconds = time.perf_counter() - started
print(json.dumps([identity.sha256, seconds, resolver.child_pid, "jaxlib" in sys.modules]))
resolver.close()
"""


def test_a_warm_look_up_parses_nothing(run_python: Any, corpus: Path, tmp_path: Path) -> None:
    program = str(corpus / "jax_tfm24_adamw_step.mlirbc")
    cold = run_python(WARM, str(tmp_path), program)
    assert cold[2] is not None
    warm = [run_python(WARM, str(tmp_path), program) for _ in range(3)]
    assert {answer[0] for answer in warm} == {cold[0]}
    assert all(pid is None and not imported for _, _, pid, imported in warm)
    # Measured 0.4 ms; the limit leaves room for a loaded machine.
    assert min(answer[1] for answer in warm) < 0.02


WITHOUT_JAXLIB = """
import importlib.util, json, sys
from pathlib import Path
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "jaxlib" else real(name, package)
from torchtpu_cache_core.canonical.program import ProgramCanonicaliser
from torchtpu_cache_core.errors import Bypass

resolver = ProgramCanonicaliser(None)
facts = resolver.facts(Path(sys.argv[1]).read_bytes())
try:
    resolver.facts(Path(sys.argv[2]).read_bytes())
except Bypass as bypass:
    print(json.dumps([facts.identity.form, facts.num_partitions, bypass.reason, resolver.child_pid]))
"""


def test_without_jaxlib_programs_are_scanned(run_python: Any, corpus: Path) -> None:
    text, kernel = corpus / "jax_tfm24_adamw_step.mlir", corpus / "kernels" / "affine.mlir"
    assert run_python(WITHOUT_JAXLIB, str(text), str(kernel)) == ["raw", 1, "unparsed_custom_call", None]


BYTECODE = """
import io, json, sys
from pathlib import Path
from torchtpu_cache_core.canonical import canonicaliser_child as child
from torchtpu_cache_core.canonical.scan import scan
from torchtpu_cache_core.errors import Bypass

context = child.context()
with context:
    module = child.ir.Module.parse(Path(sys.argv[1]).read_text())
    plain = io.BytesIO()
    module.operation.write_bytecode(plain)
    forms = [plain.getvalue(), child.stablehlo.serialize_portable_artifact(module, "1.13.0", True)]
reasons = []
for raw in forms:
    try:
        reasons.append(scan(raw).form)
    except Bypass as bypass:
        reasons.append(bypass.reason)
print(json.dumps([reasons, [child.canonicalise(raw) == child.canonicalise(forms[0]) for raw in forms]]))
"""


def test_real_bytecode_with_a_custom_call_is_seen_by_the_scan(run_python: Any, corpus: Path) -> None:
    reasons, equal = run_python(BYTECODE, str(corpus / "kernels" / "affine.mlir"))
    assert reasons == ["unparsed_custom_call"] * 2
    assert equal == [True, True]


REFUSED = """
import hashlib, json, sys
from pathlib import Path
from torchtpu_cache_core.canonical import canonicaliser_child as child

child.PORTABLE_VERSION = "0.9.0"  # older than what the program's gather needs
program = Path(sys.argv[1]).read_bytes()
context = child.context()
with context:
    module = child.stablehlo.deserialize_portable_artifact(context, program)
    named = str(module.operation.get_asm(enable_debug_info=True)).replace("module {", "module @jit_step {", 1).encode()
    altered = named.replace(b"stablehlo.multiply", b"stablehlo.maximum", 1)
    module.operation.attributes["sym_name"] = child.ir.StringAttr.get("main")
    text = module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True)
answers = [child.canonicalise(raw) for raw in (program, named, altered)]
forms = [[answer["form"], answer["sha256"]] for answer in answers]
print(json.dumps([*forms, hashlib.sha256(text.encode()).hexdigest()]))
"""


def test_a_program_that_the_version_refuses_is_hashed_as_text(run_python: Any, corpus: Path) -> None:
    program, named, altered, text = run_python(REFUSED, str(corpus / "torchtpu_zoo_4.mlirbc"))
    assert program == named == ["text", text]
    assert altered[0] == "text"
    assert altered[1] != text


def test_the_working_directory_cannot_replace_a_module(run_python: Any, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "jaxlib.py").write_text("raise SystemExit(3)")
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    script = WARM.replace(
        "import json, sys, time", "import sys; sys.path = [p for p in sys.path if p]; import json, time"
    )
    answer = run_python(script, str(tmp_path / "cache"), str(corpus / "jax_add.mlirbc"), cwd=tmp_path)
    assert answer[2] is not None
    aliases = [path for path in (tmp_path / "cache" / "a").rglob("*") if path.is_file()]
    assert len(aliases) == 1, "the child answered, since only its answers are kept"


def test_a_close_ends_the_child() -> None:
    resolver = ProgramCanonicaliser(None)
    resolver.facts(module())
    pid = resolver.child_pid
    assert pid is not None
    resolver.close()
    assert not Path(f"/proc/{pid}").exists()
    assert resolver.facts(module(name="again")).identity.form == "portable-1.13.0"
    resolver.close()
