"""The jaxlib CPU client, as the compile child and the loading process both use it. Needs jaxlib, not jax.

jaxlib has no public interface below jax: what is used of it (clients, options, device lists, custom calls) is kept in
this one module, and was run with 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from torchtpu_cache.compilers.base import Installation
from torchtpu_cache_core.canonical.wire import LENGTH, VARINT, read_fields, read_varint, varint_field
from torchtpu_cache_core.errors import CompilerMissing, InvalidRequest
from torchtpu_cache_core.identity import Signature, signature_of
from torchtpu_cache_core.jaxlib_library import jaxlib_library

INSTALL_HINT: Final = "pip install 'torchtpu-cache[workers]'"

_PROFILE_VERSION_FIELD: Final = 5
_MARK: Final = 1 << 40

_VERSION_LINES: Final = (
    re.compile(r"^_release_version\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE),
    re.compile(r"^_version\b[^=\n]*=\s*['\"]([^'\"\n]+)['\"]", re.MULTILINE),
)


def installation() -> Installation:
    """Where jaxlib keeps XLA, found without importing it.

    The version is read from the package's own source, because the metadata beside it can be stale.

    Raises:
        CompilerMissing: no jaxlib here, or none with a library.
    """
    spec = find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise CompilerMissing(f"jaxlib is not installed here; run: {INSTALL_HINT}")
    folder = Path(spec.origin).parent
    return _installation(folder, _signature(folder), _signature(folder / "version.py"))


@functools.lru_cache(maxsize=4)
def _installation(folder: Path, *states: Signature | None) -> Installation:
    """What is in the folder, looked at again once another package is unpacked there: every program asks."""
    library = jaxlib_library()
    if library is None:
        raise CompilerMissing(f"the jaxlib in {folder} holds no library; run: {INSTALL_HINT}")
    return Installation(library.resolve(), _version(folder / "version.py"))


def _signature(path: Path) -> Signature | None:
    try:
        return signature_of(path.stat())
    except OSError:
        return None


def _version(source: Path) -> str:
    try:
        text = source.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next((found[1] for line in _VERSION_LINES if (found := line.search(text))), "")


@functools.cache
def import_jaxlib() -> Any:
    """jaxlib's client module, with the kernels that jax lets CPU programs call registered. CompilerMissing without it.

    A program of jax with, say, a Cholesky decomposition calls LAPACK by name; without these registrations it neither
    compiles nor loads. Registering twice, as a later import of jax does, is harmless.
    """
    # As jax does on its import: without it each client prints its devices.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    try:
        from jaxlib import cpu_sparse, lapack, xla_client
    except ImportError as error:
        raise CompilerMissing(f"jaxlib cannot be imported here ({error}); run: {INSTALL_HINT}") from None
    for module in (lapack, cpu_sparse):
        for platform, targets in module.registrations().items():
            for name, function, api_version in targets:
                xla_client.register_custom_call_target(name, function, platform=platform, api_version=api_version)
    return xla_client


@functools.cache
def initialise_kernels() -> None:
    """Finds the LAPACK that the registered kernels call; needed before a run. It imports scipy, so not before."""
    from jaxlib.cpu import _lapack

    _lapack.initialize()


@functools.cache
def terse_print_options() -> tuple[Any, ...]:
    """What `to_string` of a module takes to print its header whole and of the rest little: a third of the time.

    None at all where this jaxlib has its options elsewhere.
    """
    try:
        from jaxlib._hlo import HloPrintOptions
    except ImportError:
        return ()
    options = HloPrintOptions()
    for name in dir(options):
        if name.startswith(("print_", "include_")):
            setattr(options, name, False)
    return (options,)


def parse_options(xla_client: Any, serialised: bytes) -> Any:
    """CompileOptions of a serialised CompileOptionsProto.

    Raises:
        InvalidRequest: the bytes are none. jaxlib says nothing and keeps what it read so far, which depends on the
            order of the fields, and the key does not.
    """
    read = xla_client.CompileOptions.ParseFromString
    # A field behind all others arrives only where everything before it could be read.
    if read(serialised + varint_field(_PROFILE_VERSION_FIELD, _MARK)).profile_version != _MARK:
        raise InvalidRequest("the compile options are no serialised CompileOptionsProto: a field in them is malformed")
    return read(serialised)


def device_grid(options: Any) -> tuple[int, int]:
    """Replicas and partitions that parsed CompileOptions ask for; a writer that leaves them out means one."""
    return max(1, options.num_replicas), max(1, options.num_partitions)


def start_client(xla_client: Any, device_count: int) -> Any:
    """A client of its own with `device_count` host devices; cheap (milliseconds)."""
    return xla_client.make_cpu_client(num_devices=device_count)


def assigned_devices(options: Any) -> list[int]:
    """Global ids of the devices that parsed CompileOptions ask for, replica by replica: the order of the assignment.

    Without an assignment they are the first ones.
    """
    if options.device_assignment is None:
        return list(range(math.prod(device_grid(options))))
    return parse_device_assignment(options.device_assignment.serialize())


def parse_device_assignment(serialised: bytes) -> list[int]:
    """The ids in a DeviceAssignmentProto (xla/xla_data.proto), replica by replica.

    Raises:
        InvalidRequest: its computations do not all have the same number of replicas.
    """
    columns: list[list[int]] = []
    for field in read_fields(serialised):
        if field.number == 3 and isinstance(field.value, bytes):
            columns.append(_replica_ids(field.value))
    if len({len(column) for column in columns}) > 1:
        raise InvalidRequest("the device assignment of the options is not rectangular")
    return [id_ for replica in zip(*columns, strict=True) for id_ in replica]


def _replica_ids(computation: bytes) -> list[int]:
    ids: list[int] = []
    for field in read_fields(computation):
        if field.number == 1 and field.wire_type == VARINT and isinstance(field.value, int):
            ids.append(field.value)
        elif field.number == 1 and field.wire_type == LENGTH and isinstance(field.value, bytes):
            offset = 0
            while offset < len(field.value):
                id_, offset = read_varint(field.value, offset)
                ids.append(id_)
    return ids


def make_logical(xla_client: Any, options: Any) -> None:
    """Reduces a device assignment to its logical order 0, 1, ...

    A CPU executable does not depend on it (it loads on any list of devices), and the caller's ids need not exist in
    the compiling process.
    """
    if options.device_assignment is not None:
        import numpy

        assignment = options.device_assignment
        shape = (assignment.replica_count(), assignment.computation_count())
        ids = numpy.arange(shape[0] * shape[1]).reshape(shape)
        options.device_assignment = xla_client.DeviceAssignment.create(ids)


def device_list(xla_client: Any, client: Any, ids: Sequence[int]) -> Any:
    """The client's devices with these global ids, in this order. KeyError for an id that it has not."""
    devices = {device.id: device for device in client.devices()}
    return xla_client.DeviceList(tuple(devices[id_] for id_ in ids))
