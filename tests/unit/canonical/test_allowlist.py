"""Custom calls: listed ones pass, all others are a reason to bypass."""

from __future__ import annotations

import pytest

from torchtpu_cache_core.canonical.allowlist import ALLOWED, HOST_TRANSFER, AllowList, is_callback
from torchtpu_cache_core.errors import Bypass, ConfigError

CALLBACKS = [
    "xla_python_cpu_callback",
    "xla_python_gpu_callback",
    "xla_ffi_python_cpu_callback",
    "xla_ffi_partitioned_python_cpu_callback",
    "xla_buffer_python_cpu_callback",
    HOST_TRANSFER,
]


def test_listed_targets_pass() -> None:
    AllowList().check(ALLOWED)
    assert not any(map(is_callback, ALLOWED))
    assert {"lapack_sgetrf_ffi", "lapack_cheevd_ffi", "lapack_dorgqr_ffi"} <= ALLOWED.keys()
    assert "lapack_cheevd" not in ALLOWED
    assert "lapack_sheevd_ffi" not in ALLOWED


@pytest.mark.parametrize("target", CALLBACKS)
def test_host_callbacks_bypass(target: str) -> None:
    with pytest.raises(Bypass) as caught:
        AllowList().check(["Sharding", "unknown", target])
    assert caught.value.reason == "host_callback"


@pytest.mark.parametrize("target", ["", "sharding", "Sharding ", "my_kernel", "lapack_sgetrf_ffi2"])
def test_unlisted_targets_bypass(target: str) -> None:
    with pytest.raises(Bypass) as caught:
        AllowList().check([target])
    assert caught.value.reason == "custom_call_unlisted"


def test_an_operator_may_add_targets() -> None:
    extended = AllowList.of(["my_kernel"])
    extended.check(["my_kernel", "Sharding"])
    identities = {AllowList.of(extra).identity for extra in ([], ["my_kernel"], ["my", "kernel"], ["mykernel"])}
    assert len(identities) == 4
    assert AllowList.of(["a", "b"]).identity == AllowList.of(["b", "a", "b"]).identity


@pytest.mark.parametrize("target", [*CALLBACKS, "", "x" * 257])
def test_no_operator_may_add_callbacks(target: str) -> None:
    with pytest.raises(ConfigError):
        AllowList.of([target])
