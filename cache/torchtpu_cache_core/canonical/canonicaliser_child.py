"""The helper process that parses MLIR: `python -m torchtpu_cache_core.canonical.canonicaliser_child`.

It reads hostile bytes with a C++ parser, so it may crash or hang: the parent kills it and goes on without. Each
request gets a context of its own, so that nothing of one program stays for the next; it is made, and the last one
taken down, while nobody waits.

Answers: the record of ProgramFacts, or `{"unparsed": reason}` for a program that this jaxlib cannot read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import resource
from dataclasses import dataclass
from typing import Any, Final

import jaxlib.mlir.dialects.stablehlo as stablehlo
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import chlo, sdy

from torchtpu_cache_core.canonical.allowlist import FOREIGN_OPERATION, HOST_TRANSFER
from torchtpu_cache_core.canonical.forms import (
    FORM_PORTABLE,
    FORM_TEXT,
    MEMORY_VARIABLE,
    MODULE_NAME,
    PAYLOAD_SUFFIX,
    PORTABLE_VERSION,
    ProgramFacts,
)
from torchtpu_cache_core.canonical.scan import BYTECODE_MAGIC
from torchtpu_cache_core.child import serve
from torchtpu_cache_core.request import ProgramIdentity

_STRIP: Final = "builtin.module(strip-debuginfo)"
_DIALECTS: Final = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy", "mhlo", "arith", "shape", "tensor"})
_LOOKED_AT: Final = frozenset({"custom_call", "send", "recv"})
_DEVICE_TO_DEVICE: Final = 1  # xla.ChannelHandle.ChannelType
_MAX_REASON: Final = 300
_MAX_STDERR_BYTES: Final = 64 << 20
_PARSED: Final = "text:"
_WHOLE: Final = "whole:"
# What reads like a digest of ours is digested too, so that no text passes for the kernel that has this digest.
_BARE_PAYLOADS: Final = (base64.b64encode(BYTECODE_MAGIC)[:5].decode(), _PARSED, _WHOLE)
_PAYLOAD_ATTRIBUTES: Final = ("backend_config", "mhlo.backend_config")


def context() -> ir.Context:
    """A context with every dialect that a program may use."""
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    made = ir.Context()
    made.enable_multithreading(False)
    made.append_dialect_registry(registry)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(made)
    made.load_all_available_dialects()
    return made


def canonicalise(program: bytes) -> dict[str, Any]:
    """The answer for one program."""
    return _Work(context()).answer(program)


@dataclass(frozen=True, slots=True)
class _Parsed:
    """A module as it is hashed: no debug info, a constant name, kernels by their digests."""

    module: ir.Module
    calls: set[str]
    num_replicas: int | None
    num_partitions: int | None
    uses_shardy: bool
    has_payloads: bool


class _Work:
    """A context, and what one program leaves in it."""

    def __init__(self, context: ir.Context) -> None:
        self._context = context
        self._kept: list[_Parsed] = []  # until this goes: taking a module down takes time

    def answer(self, program: bytes) -> dict[str, Any]:
        """What is said of the program."""
        with self._context:
            try:
                parsed = self._parse(program)
            except (ValueError, ir.MLIRError) as error:
                return {"unparsed": str(error)[:_MAX_REASON]}
            if any(call.startswith(f"{FOREIGN_OPERATION}vhlo.") for call in parsed.calls):
                return {"unparsed": "the program is of a StableHLO version that this jaxlib cannot read"}
            form, canonical = self._serialised(parsed, program)
        facts = ProgramFacts(
            identity=ProgramIdentity(
                form + (PAYLOAD_SUFFIX if parsed.has_payloads else ""),
                hashlib.sha256(canonical).hexdigest(),
                len(canonical),
            ),
            num_replicas=parsed.num_replicas,
            num_partitions=parsed.num_partitions,
            uses_shardy=parsed.uses_shardy,
            custom_calls=tuple(sorted(parsed.calls)),
        )
        return facts.to_json()

    def _parse(self, program: bytes) -> _Parsed:
        # Reads portable artifacts, plain bytecode and text; a plain parse leaves VHLO operations as they are.
        module = stablehlo.deserialize_portable_artifact(self._context, program)
        root = module.operation
        passmanager.PassManager.parse(_STRIP).run(root)
        calls, payloads, uses_shardy = _walk(root)
        for operation, attribute, text in payloads:
            operation.attributes[attribute] = ir.StringAttr.get(text)
        replicas, partitions = (_count(root, name) for name in ("num_replicas", "num_partitions"))
        root.attributes["sym_name"] = ir.StringAttr.get(MODULE_NAME)
        parsed = _Parsed(module, calls, replicas, partitions, uses_shardy, bool(payloads))
        self._kept.append(parsed)
        return parsed

    def _serialised(self, parsed: _Parsed, program: bytes) -> tuple[str, bytes]:
        try:
            return FORM_PORTABLE, stablehlo.serialize_portable_artifact(parsed.module, PORTABLE_VERSION, True)
        except (ValueError, ir.MLIRError):
            # Serialising works on the module itself and leaves it half converted where it fails.
            root = self._parse(program).module.operation
            return FORM_TEXT, str(root.get_asm(enable_debug_info=False, print_generic_op_form=True)).encode()


def _walk(root: ir.Operation) -> tuple[set[str], list[tuple[ir.Operation, str, str]], bool]:
    """Custom calls in all regions, the attributes that hold kernels with what stands for them, and whether
    anything is of Shardy's dialect."""
    dialects: set[str] = set()
    calls: set[str] = set()
    payloads: list[tuple[ir.Operation, str, str]] = []
    plain: set[str] = set()  # names of which nothing more is to be seen: almost all operations bear one
    advance = ir.WalkResult.ADVANCE

    def visit(operation: ir.Operation) -> ir.WalkResult:
        full_name = operation.name
        if full_name in plain:
            return advance
        dialect, _, kind = full_name.partition(".")
        dialects.add(dialect)
        if dialect not in _DIALECTS:
            calls.add(FOREIGN_OPERATION + full_name)
        if kind not in _LOOKED_AT:
            plain.add(full_name)
            return advance
        attributes = operation.attributes
        if kind == "custom_call":
            # A call without a readable name is on no list.
            calls.add(_text(attributes["call_target_name"]) or "" if "call_target_name" in attributes else "")
            for name in _PAYLOAD_ATTRIBUTES:
                if name in attributes and (text := _text(attributes[name])) is not None:
                    replaced = _without_debug_info(text)
                    if replaced is not None:
                        payloads.append((operation, name, replaced))
        elif not _between_devices(attributes):
            calls.add(HOST_TRANSFER)
        return advance

    root.walk(visit)
    return calls, payloads, "sdy" in dialects


def _between_devices(attributes: Any) -> bool:
    """Both things that can name the host in a transfer say that it is not meant."""
    try:
        to_host = "is_host_transfer" in attributes and ir.BoolAttr(attributes["is_host_transfer"]).value
        channel = stablehlo.ChannelHandle(attributes["channel_handle"])
        return not to_host and int(channel.channel_type) == _DEVICE_TO_DEVICE
    except (KeyError, ValueError, TypeError):
        return False


def _text(attribute: ir.Attribute) -> str | None:
    try:
        return str(ir.StringAttr(attribute).value)
    except (ValueError, UnicodeDecodeError):
        return None


def _count(root: ir.Operation, name: str) -> int | None:
    key = f"mhlo.{name}"
    if key not in root.attributes:
        return None
    try:
        value = int(ir.IntegerAttr(root.attributes[key]).value)
    except ValueError:
        return None
    return value if 0 <= value < 1 << 31 else None


def _without_debug_info(config: str) -> str | None:
    """A kernel's configuration with its payload replaced by a digest; None where it holds no payload.

    Mosaic's configuration is JSON with the kernel's bytecode, in base64, at `custom_call_config.body`; a bare base64
    text is taken as well. Only the payload is replaced: the rest stays as it is written. Where the payload is not
    written just once and as it is, the digest of the whole configuration stands for it, so that no other text gets it.
    """
    if not config.lstrip().startswith("{"):
        return _payload_digest(config) if config.startswith(_BARE_PAYLOADS) else None
    body = _body(config)
    if body is None:
        return None
    digest = _payload_digest(body)
    replaced = config.replace(body, digest)
    return replaced if config.count(body) == 1 and _body(replaced) == digest else _whole_digest(config)


def _body(config: str) -> str | None:
    try:
        body = json.loads(config)["custom_call_config"]["body"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return body if isinstance(body, str) and body else None


def _payload_digest(body: str) -> str:
    """Of the kernel's generic text without locations; of all its bytes where it cannot be parsed: a safe miss."""
    try:
        text = _kernel_text(base64.b64decode(body, validate=True))
    except (binascii.Error, ValueError, ir.MLIRError):
        return _whole_digest(body)
    return f"{_PARSED}{hashlib.sha256(text.encode()).hexdigest()}"


def _whole_digest(text: str) -> str:
    return f"{_WHOLE}{hashlib.sha256(text.encode()).hexdigest()}"


def _kernel_text(payload: bytes) -> str:
    if not payload.startswith(BYTECODE_MAGIC):
        raise ValueError
    context = ir.Context()
    context.enable_multithreading(False)
    context.allow_unregistered_dialects = True
    try:
        from jaxlib.mlir._mlir_libs import _tpu_ext
    except ImportError:
        pass
    else:
        _tpu_ext.register_dialect(context)  # memref takes no memory space of a dialect that is not there
    with context:
        module = ir.Module.parse(payload)
        passmanager.PassManager.parse(_STRIP).run(module.operation)
        return str(module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True))


class _Service:
    """Answers each request in a context that was made before it came."""

    def __init__(self) -> None:
        self._work = _Work(context())

    def handle(self, header: dict[str, Any], program: bytes) -> tuple[dict[str, Any], bytes]:
        return self._work.answer(program), b""

    def rest(self) -> None:
        self._work = _Work(context())


def main() -> None:
    """Serves until the parent is gone, within the memory that the parent allows."""
    memory_bytes = int(os.environ[MEMORY_VARIABLE])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_STDERR_BYTES, _MAX_STDERR_BYTES))  # what the parser prints
    service = _Service()
    serve(service.handle, after=service.rest)


if __name__ == "__main__":
    main()
