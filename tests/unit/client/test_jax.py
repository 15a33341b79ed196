"""Parts of the JAX adapter without JAX: what is a key, what bypasses, the switch, and the page against the code."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import stablehlo

import torchtpu_cache.jax
from support.forking import succeeds_in_fork
from torchtpu_cache.compilers.messages import blames_executable
from torchtpu_cache.jax import plug, switch
from torchtpu_cache.jax.program import check_module, check_options, keyed
from torchtpu_cache.jax.target import Targets
from torchtpu_cache_core.canonical.allowlist import AllowList
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.request import Target

PAGE = Path(__file__).resolve().parents[3] / "docs" / "jax.md"
SOURCES = Path(torchtpu_cache.jax.__file__).parent


# ---- the key ---------------------------------------------------------------------------------------------------------


def target(**parts: str) -> Target:
    return Target.of("cpu", {"platform": "cpu", "platform_version": "cpu", "compiler": "c" * 64, **parts})


def key(jax_key: str = "jit_f-0", **changed: Any) -> str:
    told: dict[str, Any] = {
        "jax_version": "0.10.2",
        "compressor": "zstandard",
        "target": target(),
        "environment": Environment.snapshot({}, []),
        "operations": 3,
    }
    return str(keyed(jax_key, **{**told, **changed}).key)


def test_every_part_is_in_the_key() -> None:
    keys = [
        key(),
        key("jit_f-1"),
        key("jit_g-0"),
        key(jax_version="0.10.3"),
        key(compressor="zlib"),
        key(compressor="zstd"),
        key(target=target(compiler="d" * 64)),
        key(target=target(cpu_features="avx2")),
        key(target=target(device_coords="0,0,0/0")),
        key(environment=Environment.snapshot({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, [])),
        key(environment=Environment.snapshot({}, ["job", "--xla_foo=1"])),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key(operations=4)


def test_surroundings_without_identity_have_no_key() -> None:
    environment = Environment.without_identity({}, Bypass("environment_changed", "made to be"))
    with pytest.raises(Bypass, match="environment_changed"):
        key(environment=environment)


def test_what_is_published_was_compiled_under_the_flags_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": "--a=1"})
    program = keyed(
        "jit_f-0",
        jax_version="1",
        compressor="zlib",
        target=target(),
        environment=Environment.snapshot(os.environ, []),
        operations=1,
    )
    program.check_files()
    os.environ["XLA_FLAGS"] = "--a=2"
    with pytest.raises(Bypass, match="environment_changed"):
        program.check_files()


# ---- what bypasses ---------------------------------------------------------------------------------------------------


@contextmanager
def module(text: str) -> Iterator[ir.Module]:
    with ir.Context() as context:
        registry = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(registry)
        context.append_dialect_registry(registry)
        stablehlo.register_dialect(context)
        yield ir.Module.parse(text)


def call(name: str) -> str:
    return f'"stablehlo.custom_call"(%x) {{call_target_name = "{name}"}} : (tensor<f32>) -> tensor<f32>'


def nested(line: str) -> str:
    """A module with one operation deep inside."""
    return f"""
    func.func public @main(%x: tensor<f32>, %p: tensor<i1>) -> tensor<f32> {{
      %r = "stablehlo.if"(%p) ({{
        %s = "stablehlo.if"(%p) ({{ %a = {line}
          stablehlo.return %a : tensor<f32> }}, {{ stablehlo.return %x : tensor<f32> }}) : (tensor<i1>) -> tensor<f32>
        stablehlo.return %s : tensor<f32> }}, {{ stablehlo.return %x : tensor<f32> }}) : (tensor<i1>) -> tensor<f32>
      return %r : tensor<f32>
    }}"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xla_python_cpu_callback", "host_callback"),
        ("xla_ffi_python_cpu_callback", "host_callback"),
        ("CustomSPMDPartitioning", "custom_call_unlisted"),
        ("mine", "custom_call_unlisted"),
    ],
)
def test_a_custom_call_is_found_wherever_it_stands(name: str, reason: str) -> None:
    with module(nested(call(name))) as parsed, pytest.raises(Bypass) as caught:
        check_module(parsed, AllowList.of(()))
    assert caught.value.reason == reason


def test_what_is_on_the_list_or_added_to_it_passes() -> None:
    for name, extra in (("Sharding", ()), ("lapack_spotrf_ffi", ()), ("mine", ("mine",))):
        with module(nested(call(name))) as parsed:
            assert check_module(parsed, AllowList.of(extra)) == 9


def test_a_transfer_with_the_host_calls_back() -> None:
    text = """
    func.func public @main(%x: tensor<f32>, %t: !stablehlo.token) -> !stablehlo.token {
      %0 = "stablehlo.send"(%x, %t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 2>,
        is_host_transfer = true} : (tensor<f32>, !stablehlo.token) -> !stablehlo.token
      return %0 : !stablehlo.token
    }"""
    with module(text) as parsed, pytest.raises(Bypass, match="host_callback"):
        check_module(parsed, AllowList.of(()))


def test_an_option_that_names_a_file_bypasses(tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    profile.write_bytes(b"")
    options = [("xla_dump_to", str(tmp_path)), ("level", "2"), ("on", True), ("count", 3), ("text", "words")]
    check_options(SimpleNamespace(env_option_overrides=options))
    with pytest.raises(Bypass, match="option_names_a_file"):
        check_options(SimpleNamespace(env_option_overrides=[*options, ("some_profile", str(profile))]))


# ---- targets ---------------------------------------------------------------------------------------------------------


def backend(platform: str = "cpu", version: str = "cpu", runtime: str = "pjrt_ifrt") -> Any:
    return SimpleNamespace(platform=platform, platform_version=version, runtime_type=runtime)


def devices(*kinds: str, **more: Any) -> Any:
    made = numpy.empty(len(kinds), dtype=object)
    made[:] = [SimpleNamespace(device_kind=kind, **more) for kind in kinds]
    return made


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (backend("gpu", "CUDA 12"), "platform gpu"),
        (backend("cpu", "PJRT C API 1"), "platform cpu"),
        (backend("cpu", "cpu", "proxy/pjrt_ifrt"), "runtime"),
        (backend("tpu", "TPU v5"), "0 files called libtpu.so"),
    ],
)
def test_a_compiler_that_is_no_file_of_this_process_has_no_identity(client: Any, says: str) -> None:
    with pytest.raises(Bypass, match=says) as caught:
        Targets(FileIdentities(None)).describe(client, devices("cpu"))
    assert caught.value.reason == "target_unknown"


def test_the_cpu_is_described_by_what_is_mapped() -> None:
    described = dict(Targets(FileIdentities(None)).describe(backend(), devices("cpu", "cpu")).parts)
    assert described["device_count"] == "2"
    assert len(described["compiler"]) == 64
    assert described["cpu_features"]


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    path.write_bytes(b"a compiler")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        yield


def test_a_tpu_is_described_by_its_library_and_where_its_chips_are(tmp_path: Path) -> None:
    client = backend("tpu", "TPU v5")
    chips = devices("TPU v5 lite", "TPU v5 lite", coords=(1, 0, 0), core_on_chip=0)
    with mapped(tmp_path / "libtpu.so"):
        described = dict(Targets(FileIdentities(None)).describe(client, chips).parts)
        assert described["device_coords"] == "1,0,0/0 1,0,0/0"
        assert described["compiler"] != described["jaxlib"]
        with pytest.raises(Bypass, match="does not say where it is"):
            Targets(FileIdentities(None)).describe(client, devices("TPU v5 lite"))
        (tmp_path / "more").mkdir()
        with mapped(tmp_path / "more" / "libtpu.so"), pytest.raises(Bypass, match="2 files"):
            Targets(FileIdentities(None)).describe(client, chips)


def test_a_library_that_was_replaced_under_the_process_has_no_identity(tmp_path: Path) -> None:
    library = tmp_path / "libtpu.so"
    with mapped(library):
        library.unlink()
        library.write_bytes(b"another one")
        with pytest.raises(Bypass, match="not what this process has mapped"):
            Targets(FileIdentities(None)).describe(backend("tpu", "TPU v5"), devices("TPU v5 lite", coords=(0, 0, 0)))


# ---- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "blames"),
    [
        (RuntimeError("INTERNAL: failed to parse"), True),
        (ValueError("bad"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (RuntimeError("CANCELLED: by the user"), False),
        (RuntimeError("UNAVAILABLE: the device is busy"), False),
        (RuntimeError("UNIMPLEMENTED: this client loads nothing"), False),
        (MemoryError(), False),
    ],
)
def test_what_says_nothing_of_an_executable_does_not_blame_it(error: Exception, blames: bool) -> None:
    assert blames_executable(error) is blames


# ---- the switch ------------------------------------------------------------------------------------------------------


def test_the_switch_reads_the_setting(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    settings = tmp_path / "torchtpu-cache" / "config.toml"
    assert not switch.wanted(environ)
    assert switch.wanted(environ | {"TORCHTPU_CACHE_JAX": "1"})
    assert not switch.wanted(environ | {"TORCHTPU_CACHE_JAX": "0"})
    assert not switch.wanted(environ | {"TORCHTPU_CACHE_JAX": "maybe"})
    settings.parent.mkdir()
    settings.write_text("jax = true\n")
    assert switch.wanted(environ)
    assert not switch.wanted(environ | {"TORCHTPU_CACHE_JAX": "0"})
    settings.write_text("jax = [\n")
    assert not switch.wanted(environ)


def test_no_fault_of_the_switch_reaches_jax(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(environ: object) -> bool:
        raise RuntimeError("made to fail")

    monkeypatch.setattr(switch, "wanted", broken)
    switch.initialize()
    assert "goes on without" in caplog.text


def python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_switch_costs_a_job_that_does_not_ask_next_to_nothing() -> None:
    source = """
import sys, torchtpu_cache.jax.switch as switch
switch.initialize()
print(*sorted(name for name in sys.modules if name.startswith("torchtpu_cache")))
"""
    loaded = python(source).split()
    assert [name for name in loaded if name.startswith("torchtpu_cache.")] == [
        "torchtpu_cache.jax",
        "torchtpu_cache.jax.switch",
    ]
    assert "torchtpu_cache_core.config" not in loaded


def test_without_jax_enabling_says_what_to_install() -> None:
    source = """
import sys
sys.modules["jax"] = None
import torchtpu_cache.jax
from torchtpu_cache import CompilerMissing
torchtpu_cache.jax.disable()
print(torchtpu_cache.jax.stats()["requests"])
try:
    torchtpu_cache.jax.enable()
except CompilerMissing as error:
    print(error)
"""
    assert python(source).splitlines() == ["0", "jax is not installed here; run: pip install 'torchtpu-cache[jax]'"]


# ---- the page --------------------------------------------------------------------------------------------------------


def first_column(table: str) -> list[str]:
    body = PAGE.read_text().partition(f"<!-- {table} -->")[2].partition("<!-- end -->")[0]
    rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("|")]
    return [name for row in rows[2:] for name in re.findall(r"`([^`]+)`", row)]


def test_the_page_has_every_component() -> None:
    named = set(first_column("components"))
    environment = Environment.snapshot({}, [])
    given = keyed(
        "f-0", jax_version="1", compressor="zlib", target=target(), environment=environment, operations=1
    ).components
    described = Targets(FileIdentities(None)).describe(backend(), devices("cpu")).parts
    expected = {component.name for component in given if not component.name.startswith("env.")}
    expected |= {f"target.{name}" for name, _ in described} | {"target.jaxlib", "target.device_coords", "env.*"}
    assert named == expected


def test_the_page_has_every_reason_of_the_adapter() -> None:
    named = set(first_column("bypass reasons"))
    raised = {"internal"}
    for path in SOURCES.glob("*.py"):
        raised |= set(re.findall(r'Bypass\(\s*"([a-z_]+)"', path.read_text()))
    # These are raised in the core.
    assert named == raised | {"custom_call_unlisted", "environment_changed"}


def test_the_page_has_every_private_name_and_flag() -> None:
    assert set(first_column("functions")) == {f"{module}.{name}" for module, name, _ in plug.NEEDED}
    assert first_column("flags") == list(plug.FLAGS)


def test_the_page_has_every_key_of_the_figures() -> None:
    named = set(first_column("stats"))
    assert named == set(torchtpu_cache.jax.stats())
    told = torchtpu_cache.jax.stats.__doc__ or ""
    assert {name for name in named if f"`{name}`" not in told} == set()


def test_the_line_at_the_end_says_what_came_from_where() -> None:
    figures = torchtpu_cache.jax.stats() | {
        "requests": 9,
        "hits": {"disk": 3, "remote": 2},
        "missed": 3,
        "bypassed": {"host_callback": 1},
        "compiled": 4,
        "compile_seconds": 7.25,
        "not_published": {"cheap": 2},
        "published": {"created": 1},
    }
    assert plug._summary(figures) == (
        "JAX asked for 9 programs: hits: disk 3, remote 2, missed: 3, bypassed: host_callback 1; compiled 4 in 7.2 s,"
        " about 0.0 s saved; published: created 1, not published: cheap 2, waiting for the remote: 0"
    )


def test_a_child_that_is_forked_while_jax_is_changed_can_use_it() -> None:
    with plug._lock.get():
        assert succeeds_in_fork(torchtpu_cache.jax.disable)
