"""The helper process that parses MLIR: `python -m torchtpu_cache_core.canonical.canonicaliser_child`.

It reads hostile bytes with a C++ parser, so it may crash or hang: the parent kills it and goes on without. Each
request gets a context of its own, so that nothing of one program stays for the next.

Answers: the record of ProgramFacts, or `{"unparsed": reason}` for a program that this jaxlib cannot read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import resource
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
_DEVICE_TO_DEVICE: Final = 1  # xla.ChannelHandle.ChannelType
_MAX_REASON: Final = 300
_MAX_STDERR_BYTES: Final = 64 << 20
_PARSED: Final = "text:"
_WHOLE: Final = "whole:"
# What reads like a digest of ours is digested too, so that no text passes for the kernel that has this digest.
_BARE_PAYLOADS: Final = (base64.b64encode(BYTECODE_MAGIC)[:5].decode(), _PARSED, _WHOLE)
_PAYLOAD_ATTRIBUTES: Final = ("backend_config", "mhlo.backend_config")


def _context() -> ir.Context:
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context = ir.Context()
    context.enable_multithreading(False)
    context.append_dialect_registry(registry)
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    context.load_all_available_dialects()
    return context


def canonicalise(program: bytes) -> dict[str, Any]:
    """The answer for one program."""
    context = _context()
    with context:
        try:
            # Reads portable artifacts, plain bytecode and text; a plain parse leaves VHLO operations as they are.
            module = stablehlo.deserialize_portable_artifact(context, program)
            passmanager.PassManager.parse(_STRIP).run(module.operation)
        except (ValueError, ir.MLIRError) as error:
            return {"unparsed": str(error)[:_MAX_REASON]}
        calls, payloads, uses_shardy = _walk(module.operation)
        if any(call.startswith(f"{FOREIGN_OPERATION}vhlo.") for call in calls):
            return {"unparsed": "the program is of a StableHLO version that this jaxlib cannot read"}
        for operation, attribute, text in payloads:
            operation.attributes[attribute] = ir.StringAttr.get(text)
        replicas, partitions = (_count(module.operation, name) for name in ("num_replicas", "num_partitions"))
        module.operation.attributes["sym_name"] = ir.StringAttr.get(MODULE_NAME)
        form, canonical = _serialised(module)
    facts = ProgramFacts(
        identity=ProgramIdentity(
            form + (PAYLOAD_SUFFIX if payloads else ""), hashlib.sha256(canonical).hexdigest(), len(canonical)
        ),
        num_replicas=replicas,
        num_partitions=partitions,
        uses_shardy=uses_shardy,
        custom_calls=tuple(sorted(calls)),
    )
    return facts.to_json()


def _walk(root: ir.Operation) -> tuple[set[str], list[tuple[ir.Operation, str, str]], bool]:
    """Custom calls in all regions, the attributes that hold kernels with what stands for them, and whether
    anything is of Shardy's dialect."""
    dialects: set[str] = set()
    calls: set[str] = set()
    payloads: list[tuple[ir.Operation, str, str]] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        dialect, _, kind = operation.name.partition(".")
        dialects.add(dialect)
        attributes = operation.attributes
        if dialect not in _DIALECTS:
            calls.add(FOREIGN_OPERATION + operation.name)
        if kind == "custom_call":
            # A call without a readable name is on no list.
            calls.add(_text(attributes["call_target_name"]) or "" if "call_target_name" in attributes else "")
            for name in _PAYLOAD_ATTRIBUTES:
                if name in attributes and (text := _text(attributes[name])) is not None:
                    replaced = _without_debug_info(text)
                    if replaced is not None:
                        payloads.append((operation, name, replaced))
        elif kind in ("send", "recv") and not _between_devices(attributes):
            calls.add(HOST_TRANSFER)
        return ir.WalkResult.ADVANCE

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
    text is taken as well. Only the payload is replaced: the rest stays as it is written.
    """
    body: object = config
    if config.lstrip().startswith("{"):
        try:
            body = json.loads(config)["custom_call_config"]["body"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
    elif not config.startswith(_BARE_PAYLOADS):
        return None
    if not isinstance(body, str) or not body or config.count(body) != 1:
        return None
    return config.replace(body, _payload_digest(body))


def _payload_digest(body: str) -> str:
    """Of the kernel's generic text without locations; of all its bytes where it cannot be parsed: a safe miss."""
    try:
        text = _kernel_text(base64.b64decode(body, validate=True))
    except (binascii.Error, ValueError, ir.MLIRError):
        return f"{_WHOLE}{hashlib.sha256(body.encode()).hexdigest()}"
    return f"{_PARSED}{hashlib.sha256(text.encode()).hexdigest()}"


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


def _serialised(module: ir.Module) -> tuple[str, bytes]:
    # Serialising works on the module itself and leaves it half converted where it fails.
    spare = module.operation.clone()
    try:
        return FORM_PORTABLE, stablehlo.serialize_portable_artifact(module, PORTABLE_VERSION, True)
    except (ValueError, ir.MLIRError):
        return FORM_TEXT, str(spare.get_asm(enable_debug_info=False, print_generic_op_form=True)).encode()


def _handle(header: dict[str, Any], program: bytes) -> tuple[dict[str, Any], bytes]:
    return canonicalise(program), b""


def main() -> None:
    """Serves until the parent is gone, within the memory that the parent allows."""
    memory_bytes = int(os.environ[MEMORY_VARIABLE])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_STDERR_BYTES, _MAX_STDERR_BYTES))  # what the parser prints
    serve(_handle)


if __name__ == "__main__":
    main()
