"""Kernels inside custom calls, with a real Pallas kernel and with payloads made here."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from torchtpu_cache_core.canonical.program import ProgramCanonicaliser

# Bytecode of a kernel with locations, in a dialect that no MLIR context knows.
PAYLOADS = """
import base64, io, json, sys
from jaxlib.mlir import ir

TEXT = '''
module {{
  "kernel.func"() ({{
    ^bb0(%a: vector<8xf32>):
      %0 = "kernel.{op}"(%a) {{n = {n} : i64}} : (vector<8xf32>) -> vector<8xf32> loc("{path}":{line}:1)
      "kernel.return"(%0) : (vector<8xf32>) -> ()
  }}) {{sym_name = "k"}} : () -> () loc("{path}":{line}:1)
}} loc("{path}":1:1)
'''

made = {}
for name, values in {
    "plain": {},
    "moved": {"path": "/srv/deep/er/kernel.py"},
    "shifted": {"line": 17},
    "other_op": {"op": "mul"},
    "other_constant": {"n": 2},
}.items():
    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        text = TEXT.format(**{"op": "add", "n": 1, "path": "/home/ada/kernel.py", "line": 7, **values})
        raw = io.BytesIO()
        ir.Module.parse(text).operation.write_bytecode(raw)
    made[name] = base64.b64encode(raw.getvalue()).decode()
print(json.dumps(made))
"""

MODULE = """module @jit_f {
  func.func public @main(%%a: tensor<8xf32>) -> tensor<8xf32> {
    %%0 = stablehlo.custom_call @tpu_custom_call(%%a) {backend_config = %s} : (tensor<8xf32>) -> tensor<8xf32>
    return %%0 : tensor<8xf32>
  }
}
"""


@pytest.fixture(scope="module")
def payloads(run_python: Any) -> dict[str, str]:
    made: dict[str, str] = run_python(PAYLOADS)
    assert len(set(made.values())) == len(made), "each payload has bytes of its own"
    return made


@pytest.fixture(scope="module")
def digest_of(run_python: Any) -> Any:
    """What stands for a payload in the canonical form."""
    source = """
import json, sys
from torchtpu_cache_core.canonical import canonicaliser_child as child
child.context()
print(json.dumps(child._payload_digest(sys.argv[1])))
"""

    def digest(body: str) -> str:
        found: str = run_python(source, body)
        assert found.startswith("text:")
        return found

    return digest


def wrapped(body: str, **more: object) -> str:
    return json.dumps({"custom_call_config": {"body": body, "serialization_format": 1, **more}})


def sha256(canonicaliser: ProgramCanonicaliser, config: str) -> str:
    quoted = '"' + config.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return canonicaliser.resolve((MODULE % quoted).encode()).sha256


@pytest.mark.parametrize("wrap", [wrapped, str], ids=["json", "bare"])
def test_only_code_counts(canonicaliser: ProgramCanonicaliser, payloads: dict[str, str], wrap: Any) -> None:
    found = {name: sha256(canonicaliser, wrap(body)) for name, body in payloads.items()}
    assert found["plain"] == found["moved"] == found["shifted"]
    assert len(set(found.values())) == 3


def test_what_stands_beside_the_payload_counts(canonicaliser: ProgramCanonicaliser, payloads: dict[str, str]) -> None:
    body = payloads["plain"]
    configs = [
        wrapped(body),
        wrapped(body, needs_layout_passes=True),
        wrapped(body, vmem_limit_bytes=1 << 20),
        json.dumps({"custom_call_config": {"serialization_format": 1, "body": body}}),
        json.dumps({"custom_call_config": {"body": body}, "device_type": "DEVICE_TYPE_SPARSECORE"}),
        body,
    ]
    assert len({sha256(canonicaliser, config) for config in configs}) == len(configs)


@pytest.mark.parametrize("wrap", [wrapped, str], ids=["json", "bare"])
def test_an_unparsed_payload_counts_whole(
    canonicaliser: ProgramCanonicaliser, payloads: dict[str, str], wrap: Any
) -> None:
    raw = base64.b64decode(payloads["plain"])
    broken = [raw[:-9], raw[:-8] + b"\0" * 8, raw[:40]]
    texts = [base64.b64encode(data).decode() for data in broken]
    found = {sha256(canonicaliser, wrap(text)) for text in [*texts, payloads["plain"], payloads["moved"]]}
    assert len(found) == len(broken) + 1


@pytest.mark.parametrize(
    "config",
    ["", "{", "{}", '{"custom_call_config": 3}', '{"custom_call_config": {"body": 7}}', "TUzvUg!!", "[" * 5000],
)
def test_odd_configurations_count_whole(canonicaliser: ProgramCanonicaliser, config: str) -> None:
    assert sha256(canonicaliser, config) != sha256(canonicaliser, config + " ")


def test_a_payload_cannot_pose_as_its_digest(canonicaliser: ProgramCanonicaliser, payloads: dict[str, str]) -> None:
    """The text that stands for a payload, given as a payload, is another program."""
    body = payloads["plain"]
    for forged in ("text:" + "0" * 64, "whole:" + "0" * 64):
        first = sha256(canonicaliser, wrapped(forged))
        assert first != sha256(canonicaliser, wrapped(body))
        assert first != sha256(canonicaliser, wrapped(forged.replace("0", "1")))


def test_the_digest_of_one_kernel_beside_another_cannot_pose_as_it(
    canonicaliser: ProgramCanonicaliser, payloads: dict[str, str], digest_of: Any
) -> None:
    """Another call with a payload gives both modules the same form."""
    digest = digest_of(payloads["plain"])
    two_calls = """module {
      func.func public @main(%%a: tensor<8xf32>) -> tensor<8xf32> {
        %%0 = stablehlo.custom_call @tpu_custom_call(%%a) {backend_config = "%s"} : (tensor<8xf32>) -> tensor<8xf32>
        %%1 = stablehlo.custom_call @tpu_custom_call(%%0) {backend_config = "%s"} : (tensor<8xf32>) -> tensor<8xf32>
        return %%1 : tensor<8xf32>
      }
    }"""
    texts = [payloads["plain"], digest, "whole:" + "0" * 64, "whole:" + "1" * 64]
    programs = [(two_calls % (text, payloads["other_op"])).encode() for text in texts]
    identities = {canonicaliser.resolve(program) for program in programs}
    assert {identity.form for identity in identities} == {"portable-1.13.0+payload"}
    assert len(identities) == len(texts)


@pytest.mark.parametrize("escaped", [False, True])
def test_what_stands_beside_a_payload_cannot_pose_as_its_digest(
    canonicaliser: ProgramCanonicaliser, payloads: dict[str, str], digest_of: Any, escaped: bool
) -> None:
    """The payload may be written in escapes, and it or its digest a second time elsewhere in the configuration."""
    body = payloads["plain"]
    written = f"\\u{ord(body[0]):04x}{body[1:]}" if escaped else body
    digest = digest_of(body)
    beside = [[body, digest], [digest, body], [digest, digest], [body, body], ["", digest], ["", body], ["", ""]]
    configs = [
        f'{{"custom_call_config": {{"body": "{text}"}}, "x": "{x}", "y": "{y}"}}'
        for x, y in beside
        for text in {written, digest}
    ]
    assert len({sha256(canonicaliser, config) for config in configs}) == len(configs)


def test_a_real_pallas_kernel(canonicaliser: ProgramCanonicaliser, corpus: Path) -> None:
    kernels = corpus / "kernels"
    found = {path.stem: canonicaliser.facts(path.read_bytes()) for path in kernels.glob("*.mlir")}
    assert {facts.identity.form for facts in found.values()} == {"portable-1.13.0+payload"}
    assert {facts.custom_calls for facts in found.values()} == {("tpu_custom_call",)}
    assert found["affine"].identity == found["affine_moved"].identity
    assert found["affine"].identity != found["affine_changed"].identity
