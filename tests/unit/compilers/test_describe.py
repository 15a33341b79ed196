"""A target is described from files, without importing a compiler; its identity is their bytes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from torchtpu_cache.compilers import registry
from torchtpu_cache.compilers.cpu import CpuCompiler
from torchtpu_cache.compilers.jaxlib_cpu import parse_device_assignment
from torchtpu_cache.compilers.tpu import TpuCompiler, installation
from torchtpu_cache_core.canonical.environment import Environment
from torchtpu_cache_core.canonical.options import encode_options
from torchtpu_cache_core.canonical.wire import length_field, varint_field
from torchtpu_cache_core.errors import Bypass, CompilerMissing, InvalidRequest
from torchtpu_cache_core.host import HostCpu
from torchtpu_cache_core.identity import FileIdentities
from torchtpu_cache_core.request import Target

ONE = encode_options(use_spmd_partitioning=False)
PLAIN = Environment.snapshot({}, ())


class Packages:
    """A folder of made-up packages, the only one that can be imported from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, **files: bytes | str) -> Path:
        package = self.folder / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(f"raise AssertionError('{name} was imported')")
        for file, content in files.items():
            raw = content.encode() if isinstance(content, str) else content
            (package / file.replace("__", ".")).write_bytes(raw)
        importlib.invalidate_caches()
        return package


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in ("jaxlib", "libtpu", "pypjrt"):
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
    installed = {path for path in sys.path if path.endswith("site-packages")}
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if path not in installed)])
    return Packages(folder)


def jaxlib(packages: Packages, library: bytes = b"xla" * 100, version: str = "1.2.3") -> Path:
    return packages.add(
        "jaxlib",
        libjax_common__so=library,
        _jax__so=b"stub",
        version__py=f"_version = '0.0.0'\n_release_version: str = '{version}'\n",
    )


def describe(options: bytes = ONE, environment: Environment = PLAIN) -> Target:
    return CpuCompiler(FileIdentities(None)).describe("cpu", options, environment)


def test_a_cpu_target_has_these_parts(packages: Packages) -> None:
    jaxlib(packages)
    target = describe()
    assert [name for name, _ in target.parts] == [
        "compiler",
        "cpu_features",
        "cpu_name",
        "device_count",
        "platform",
        "platform_version",
    ]
    assert target.platform == "cpu"
    assert target.part("platform_version") == "cpu / jaxlib 1.2.3"
    assert target.position_independent


def test_the_library_alone_is_the_compiler_s_identity(packages: Packages) -> None:
    jaxlib(packages)
    first = describe()
    metadata = packages.folder / "jaxlib-9.9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxlib\nVersion: 9.9.9\n")
    assert describe() == first, "metadata says what was installed once, not what lies there"
    jaxlib(packages, library=b"XLA" * 100)
    assert describe().compiler != first.compiler, "other bytes under the same version"


def test_an_older_layout_is_found_by_size(packages: Packages) -> None:
    folder = packages.add("jaxlib", xla_extension__so=b"xla" * 100, version__py="_version = '0.4.30'\n")
    (folder / "utils.so").write_bytes(b"small")
    assert describe().part("platform_version") == "cpu / jaxlib 0.4.30"


def test_without_a_version_there_is_no_identity(packages: Packages) -> None:
    packages.add("jaxlib", libjax_common__so=b"xla")
    with pytest.raises(Bypass, match="platform version"):
        describe()


def test_the_cpu_counts(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    jaxlib(packages)
    targets = set()
    for name, features in (("a", ("avx",)), ("b", ("avx",)), ("a", ("avx", "avx512f"))):
        cpu = HostCpu(name=name, features=features)
        monkeypatch.setattr("torchtpu_cache.compilers.cpu.host_cpu", lambda cpu=cpu: cpu)
        targets.add(describe())
    assert len(targets) == 3


@pytest.mark.parametrize(
    ("options", "flags", "count"),
    [
        (ONE, "", 1),
        (encode_options(num_replicas=2, num_partitions=3, use_spmd_partitioning=True), "", 6),
        (ONE, "--xla_force_host_platform_device_count=8", 8),
        (
            encode_options(num_replicas=2, use_spmd_partitioning=False),
            "--xla_force_host_platform_device_count=1",
            2,
        ),
    ],
)
def test_devices_are_what_options_or_flags_ask_for(packages: Packages, options: bytes, flags: str, count: int) -> None:
    jaxlib(packages)
    environment = Environment.snapshot({"XLA_FLAGS": flags}, ())
    assert describe(options, environment).part("device_count") == str(count)


@pytest.mark.parametrize("value", ["many", "-1", "9999999999"])
def test_a_senseless_device_count_is_refused(packages: Packages, value: str) -> None:
    jaxlib(packages)
    environment = Environment.snapshot({"XLA_FLAGS": f"--xla_force_host_platform_device_count={value}"}, ())
    with pytest.raises(InvalidRequest, match="devices"):
        describe(ONE, environment)


def test_an_absent_jaxlib_says_what_to_install(packages: Packages) -> None:
    with pytest.raises(CompilerMissing, match=r"pip install 'torchtpu-cache\[workers\]'"):
        describe()


def test_an_absent_libtpu_says_what_to_install(packages: Packages) -> None:
    packages.add("pypjrt")
    with pytest.raises(CompilerMissing, match=r"libtpu.*pip install 'torchtpu-cache\[workers,tpu\]'"):
        TpuCompiler(FileIdentities(None), None).describe("v5e:2x2", ONE, PLAIN)


def test_an_absent_pypjrt_says_what_to_install(packages: Packages) -> None:
    packages.add("libtpu", libtpu__so=b"libtpu")
    with pytest.raises(CompilerMissing, match=r"pypjrt.*pip install 'torchtpu-cache\[workers,tpu\]'"):
        installation({})


def test_a_named_library_goes_before_the_package(packages: Packages, tmp_path: Path) -> None:
    packages.add("pypjrt")
    packages.add("libtpu", libtpu__so=b"libtpu")
    mine = tmp_path / "mine.so"
    mine.write_bytes(b"mine")
    assert installation({"TPU_LIBRARY_PATH": str(mine)}).library == mine.resolve()
    assert installation({}).library == packages.folder / "libtpu" / "libtpu.so"
    with pytest.raises(CompilerMissing, match="which is no file"):
        installation({"TPU_LIBRARY_PATH": str(tmp_path / "absent.so")})


def test_compiler_flags_on_the_command_line_are_no_ground_for_a_tpu_key(packages: Packages) -> None:
    environment = Environment.snapshot({}, ["job", "--xla_tpu_scoped_vmem_limit_kib=4096"])
    with pytest.raises(Bypass, match="LIBTPU_INIT_ARGS"):
        TpuCompiler(FileIdentities(None), None).describe("v5e:2x2", ONE, environment)


def test_doctor_sees_what_is_here_and_what_is_not(packages: Packages) -> None:
    jaxlib(packages)
    cpu, tpu = registry.targets_here({})
    assert (cpu.kind, cpu.usable, cpu.version) == ("cpu", True, "1.2.3")
    assert cpu.library == packages.folder / "jaxlib" / "libjax_common.so"
    assert (tpu.kind, tpu.usable, tpu.library) == ("tpu", False, None)
    assert "pip install" in tpu.problem


def test_targets_of_one_kind_share_a_compiler() -> None:
    with registry.Compilers(identities=FileIdentities(None), memo_dir=None) as compilers:
        assert compilers.for_target("v5e:2x2") is compilers.for_target("v6e:2x2")
        assert compilers.for_target("cpu") is compilers.for_target("cpu")
        assert compilers.for_target("cpu") is not compilers.for_target("v5e:2x2")
        with pytest.raises(InvalidRequest):
            compilers.for_target("gpu")


def assignment(*computations: bytes) -> bytes:
    return b"".join(length_field(3, computation) for computation in computations)


def test_a_device_assignment_is_read_replica_by_replica() -> None:
    packed = assignment(length_field(1, bytes([0, 2, 4])), length_field(1, bytes([1, 3, 5])))
    single = assignment(
        b"".join(varint_field(1, i) for i in (0, 2, 4)), b"".join(varint_field(1, i) for i in (1, 3, 5))
    )
    assert parse_device_assignment(packed) == parse_device_assignment(single) == [0, 1, 2, 3, 4, 5]


def test_a_ragged_device_assignment_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not rectangular"):
        parse_device_assignment(assignment(length_field(1, bytes([0, 1])), length_field(1, bytes([2]))))
