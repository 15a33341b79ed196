"""The JAX adapter on every release of JAX that there is an environment for: two machines, one service, real jobs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zstandard

from support.jaxes import ENVIRONMENTS, JOBS, Machine, files_of, python_of
from support.served import Served
from support.service import running_service
from torchtpu_cache_core.entry import Entry

JOB = JOBS / "job.py"
API_JOB = JOBS / "api_job.py"

Make = Callable[..., Machine]


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def python(request: pytest.FixtureRequest) -> str:
    return python_of(request.param)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running_service(tmp_path_factory.mktemp("service") / "data") as running:
        yield running


@pytest.fixture
def machine(python: str, tmp_path: Path) -> Make:
    def make(name: str, **settings: Any) -> Machine:
        return Machine(tmp_path / name, python, **settings)

    return make


def entry_at(path: Path) -> Entry:
    """The entry of a file of the disk tier, without what stands behind it."""
    raw = path.read_bytes()
    for end in range(len(raw), 0, -1):
        if hashlib.sha256(raw[: end - 32]).digest() == raw[end - 32 : end]:
            return Entry.parse(raw[:end])
    raise AssertionError(f"{path} holds no entry")


def replace_executable(path: Path, executable: bytes) -> None:
    """Another executable under the same key: whole, and wrong."""
    header = entry_at(path).header
    entry = Entry.build(
        executable,
        components=header.components,
        executable_format=header.executable_format,
        producer=header.producer,
        road=header.road,
        compile_seconds=header.compile_seconds,
        created_seconds=header.created_seconds,
        compress=False,
    )
    path.write_bytes(entry.buffer)


def corrupt(machine: Machine) -> int:
    """Damages every entry of a machine, each in another way; gives how many of them nobody can load."""
    garbage = zstandard.ZstdCompressor().compress(b"\0\0\0\1" + b"no executable" * 100)
    paths = list(files_of(machine.cache))
    for number, path in enumerate(paths):
        if number % 3 == 2:
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 1
            path.write_bytes(raw)
        else:
            replace_executable(path, b"no zstd frame" * 100 if number % 3 else garbage)
    return sum(number % 3 != 2 for number in range(len(paths)))


def test_a_second_machine_compiles_nothing_and_bad_entries_are_replaced(
    machine: Make, service: Served, tmp_path: Path
) -> None:
    a = machine("a", remote=service.url, variables={"MACHINE": "A", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "x")})
    b = machine("b", remote=service.url, variables={"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "y" / "z")})

    cold = a.run(JOB, "programs", "callback")
    assert cold["used"]
    assert cold["stats"]["hits"] == {}
    assert cold["stats"]["tier_misses"] == {"memory": 3, "disk": 3, "remote": 3}
    assert cold["stats"]["compiled"] == 4
    assert cold["stats"]["bypassed"] == {"host_callback": 1}
    assert (cold["stats"]["requests"], cold["stats"]["missed"]) == (4, 3)
    assert cold["outputs"]["callback"] == "sin"
    check_headers(a, cold["jax"])

    second = b.run(JOB, "programs", "callback")
    assert second["stats"]["hits"] == {"remote": 3}
    assert second["stats"]["compiled"] == 1  # what calls back
    assert second["stats"]["failures"] == {}
    assert (second["stats"]["requests"], second["stats"]["missed"]) == (4, 0)
    assert second["outputs"]["callback"] == "cos"
    assert second["outputs"]["programs"] == cold["outputs"]["programs"]

    third = b.run(JOB, "programs", TORCHTPU_CACHE_REMOTE="")
    assert third["stats"]["hits"] == {"disk": 3}
    assert third["stats"]["compiled"] == 0
    assert third["outputs"]["programs"] == cold["outputs"]["programs"]

    unloadable = corrupt(b)
    from_remote = b.run(JOB, "programs")
    assert from_remote["stats"]["hits"] == {"remote": 3}
    assert from_remote["stats"]["compiled"] == 0
    assert from_remote["stats"]["failures"] == {"disk.load": unloadable, "disk.corrupt": 3 - unloadable}
    assert from_remote["outputs"]["programs"] == cold["outputs"]["programs"]

    corrupt(b)
    compiled_again = b.run(JOB, "programs", TORCHTPU_CACHE_REMOTE="")
    assert compiled_again["stats"]["hits"] == {}
    assert compiled_again["stats"]["compiled"] == 3
    assert compiled_again["outputs"]["programs"] == cold["outputs"]["programs"]
    repaired = b.run(JOB, "programs", TORCHTPU_CACHE_REMOTE="")
    assert repaired["stats"]["hits"] == {"disk": 3}
    assert repaired["stats"]["failures"] == {}

    # JAX's own folders were left alone, and their names are in no key.
    assert [path for name in "xy" for path in (tmp_path / name).rglob("*-cache")] == []
    check_modes(a, machine("read"), cold["outputs"]["programs"])


def check_headers(machine: Machine, jax_version: str) -> None:
    """Entries say what they are, and are not compressed twice."""
    names = set()
    for path in files_of(machine.cache):
        header = entry_at(path).header
        components = {component.name: component for component in header.components}
        assert components["jax.version"].text == jax_version
        assert components["jax.compressor"].text == "zstandard"
        assert components["executable_format"].text == header.executable_format == "jax-cache"
        assert components["target.platform"].text == "cpu"
        assert len(components["target.compiler"].text or "") == 64
        assert header.codec == "raw"
        assert header.compile_seconds % 1  # JAX itself hands on whole seconds
        names.add((components["jax.key"].text or "").rpartition("-")[0])
    assert names == {"jit_train", "jit_spectrum", "jit_rolled"}


def check_modes(warm: Machine, empty: Machine, outputs: object) -> None:
    jobs = {"off": warm, "read": empty, "record": warm}
    with ThreadPoolExecutor(2) as pool:
        local = {"TORCHTPU_CACHE_REMOTE": ""}
        running = {
            mode: pool.submit(on.run, JOB, "programs", TORCHTPU_CACHE=mode, **local) for mode, on in jobs.items()
        }
    reports = {mode: future.result() for mode, future in running.items()}
    assert all(report["outputs"]["programs"] == outputs for report in reports.values())
    assert reports["off"]["stats"]["requests"] == 0
    assert reports["read"]["stats"]["compiled"] == 3
    assert list(files_of(empty.cache)) == []
    assert reports["record"]["stats"]["hits"] == {}
    assert reports["record"]["stats"]["compiled"] == 3


def test_the_interface_and_strange_surroundings(machine: Make, tmp_path: Path) -> None:
    variables = {"TORCHTPU_CACHE_JAX": "", "OWN_FOLDER": str(tmp_path / "own")}
    words = ("not_asked", "missing", "other_parameters", "disabling", "compressors", "no_exception_from_below")
    flags = ("client_options", "changed_flags", "turned_off", "failing")
    report = machine("a", variables=variables).run(API_JOB, *words, *flags)
    assert report["outputs"]["compressors"] in ([0, 1, 1, 0, 0], [0, 1, 0, 0])
