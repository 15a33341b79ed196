"""Custom calls that a program may hold and still be cached.

A custom call names code outside the program. It may be cached only where the name alone, together with compiler and
target, says what will run: operations that XLA itself knows, kernels whose whole text is in the call, and routines
that jaxlib brings along. A Python callback is none of these: two different
callbacks give the same program.

Sources: JAX's list of stable targets (jax/_src/export/_export.py in 0.10.2), its lowerings, the symbols of jaxlib's
`cpu/_lapack.so` and `cpu/_sparse.so`, and XLA's Shardy round trip (xla/service/spmd/shardy).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from torchtpu_cache_core.errors import Bypass, ConfigError

ALLOWLIST_VERSION: Final = "1"
MAX_TARGET_BYTES: Final = 256

HOST_TRANSFER: Final = "send or recv with the host"
"""Stands among a program's custom calls for such a transfer: how JAX calls back to Python on a TPU."""

FOREIGN_OPERATION: Final = "operation "
"""Stands there before the name of an operation from a dialect that is not looked into."""

_SHARDING: Final = "an annotation that XLA consumes"
_KNOWN: Final = "an operation that XLA itself knows"
_KERNEL: Final = "the kernel's text is in the call"
_JAXLIB: Final = "a routine of jaxlib, found by its name in the process that runs it"

_ALL_TYPES: Final = ("gees", "geev", "gehrd", "geqp3", "geqrf", "gesdd", "gesvd", "getrf", "gtsv", "potrf", "trsm")
_REAL_ONLY: Final = ("orgqr", "ormqr", "syevd", "sytrd")
_COMPLEX_ONLY: Final = ("heevd", "hetrd", "ungqr", "unmqr")

ALLOWED: Final[dict[str, str]] = {
    "LayoutConstraint": _SHARDING,
    "MoveToDevice": _SHARDING,
    "MoveToHost": _SHARDING,
    "PinToDevice": _SHARDING,
    "PinToDeviceSram": _SHARDING,
    "SPMDFullToShardShape": _SHARDING,
    "SPMDShardToFullShape": _SHARDING,
    "Sharding": _SHARDING,
    "annotate_device_placement": _SHARDING,
    "shape_assertion": _SHARDING,
    "xla.sdy.FuncResultSharding": _SHARDING,
    "xla.sdy.GlobalToLocalShape": _SHARDING,
    "xla.sdy.LocalToGlobalShape": _SHARDING,
    "xla.sdy.PropagationBarrier": _SHARDING,
    "xla.sdy.ShardingGroup": _SHARDING,
    "AllocateBuffer": _KNOWN,
    "ApproxTopK": _KNOWN,
    "Eigh": _KNOWN,
    "LuDecomposition": _KNOWN,
    "PadToStatic": _KNOWN,
    "PartialReduce": _KNOWN,
    "ProductOfElementaryHouseholderReflectors": _KNOWN,
    "Qr": _KNOWN,
    "ResizeNearest": _KNOWN,
    "ResizeNearestGrad": _KNOWN,
    "SetBound": _KNOWN,
    "SliceToDynamic": _KNOWN,
    "TopK": _KNOWN,
    "mhlo.acos": _KNOWN,
    "mhlo.acosh": _KNOWN,
    "mhlo.asin": _KNOWN,
    "mhlo.asinh": _KNOWN,
    "mhlo.atanh": _KNOWN,
    "mhlo.cosh": _KNOWN,
    "mhlo.erf": _KNOWN,
    "mhlo.ragged_dot": _KNOWN,
    "mhlo.sinh": _KNOWN,
    "mhlo.tan": _KNOWN,
    "mhlo.topk": _KNOWN,
    "stablehlo.dynamic_approx_top_k": _KNOWN,
    "stablehlo.dynamic_reduce_window": _KNOWN,
    "stablehlo.dynamic_rng_bit_generator": _KNOWN,
    "stablehlo.dynamic_top_k": _KNOWN,
    "tpu_custom_call": _KERNEL,
    "cpu_csr_sparse_dense_ffi": _JAXLIB,
    "tridiagonal_solve_perturbed_ffi": _JAXLIB,
    **{f"lapack_{kind}{name}_ffi": _JAXLIB for name in _ALL_TYPES for kind in "sdcz"},
    **{f"lapack_{kind}{name}_ffi": _JAXLIB for name in _REAL_ONLY for kind in "sd"},
    **{f"lapack_{kind}{name}_ffi": _JAXLIB for name in _COMPLEX_ONLY for kind in "cz"},
}
"""Target name to the reason why it may be cached. Every change here is a change of ALLOWLIST_VERSION."""


def is_callback(target: str) -> bool:
    """The target runs Python code of the calling process, as far as its name tells.

    Matches `xla_python_cpu_callback`, `xla_ffi_python_cpu_callback`, `xla_ffi_partitioned_python_cpu_callback`,
    `xla_buffer_python_cpu_callback`, their GPU kin, and whatever else calls itself so.
    """
    return target == HOST_TRANSFER or "callback" in target.lower() or "py_func" in target.lower()


@dataclass(frozen=True, slots=True)
class AllowList:
    """The written list and what an operator adds to it. Built by `of`.

    Args:
        extra: further targets; who adds one promises that its name says what runs, on every machine of the fleet.
    """

    extra: frozenset[str] = frozenset()

    @classmethod
    def of(cls, extra: Iterable[str]) -> Self:
        """The list with `extra` added.

        Raises:
            ConfigError: a target is empty, over 256 bytes, or a host callback, which no list can make safe.
        """
        targets = frozenset(extra)
        for target in sorted(targets):
            if not target or len(target.encode(errors="replace")) > MAX_TARGET_BYTES:
                raise ConfigError(f"{target[:80]!r} is no custom call target: it must have 1 to 256 bytes")
            if is_callback(target):
                raise ConfigError(f"{target!r} is a host callback: two of them look the same, so none can be allowed")
        return cls(targets)

    @property
    def identity(self) -> str:
        """Changes with the version of the written list and with every addition."""
        framed = b"".join(b"%d:%s" % (len(raw), raw) for raw in sorted(t.encode(errors="replace") for t in self.extra))
        return f"{ALLOWLIST_VERSION}-{hashlib.sha256(framed).hexdigest()[:32]}"

    def check(self, custom_calls: Iterable[str]) -> None:
        """Refuses a program for its custom calls.

        Raises:
            Bypass: `host_callback`, or `custom_call_unlisted` with the target's name.
        """
        targets = sorted(set(custom_calls))
        for target in targets:
            if is_callback(target):
                raise Bypass("host_callback", f"the program holds {_shown(target)}")
        for target in targets:
            if target not in ALLOWED and target not in self.extra:
                raise Bypass("custom_call_unlisted", f"the program holds {_shown(target)}")


def _shown(target: str) -> str:
    if target == HOST_TRANSFER or target.startswith(FOREIGN_OPERATION):
        return target[:MAX_TARGET_BYTES]
    return "a call of " + ascii(target[:MAX_TARGET_BYTES])
