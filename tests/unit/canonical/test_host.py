"""The host's CPU, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.host import host_cpu

X86 = """processor\t: {number}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C
stepping\t: 8
cpu MHz\t\t: 2699.{number}
flags\t\t: {flags}

"""
ARM = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x1
CPU part\t: 0xd40
CPU revision\t: 1

"""


def cpu(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_listing_order_and_clock_have_no_meaning(tmp_path: Path) -> None:
    one = host_cpu(cpu(tmp_path, "f1", X86.format(number=0, flags="fpu avx2 avx512f avx2")))
    other = host_cpu(cpu(tmp_path, "f3", X86.format(number=7, flags="avx512f fpu avx2")))
    assert one == other
    assert one.features == ("avx2", "avx512f", "fpu")
    assert one.name == (
        "vendor_id=GenuineIntel,cpu family=6,model=143,stepping=8,model name=Intel(R) Xeon(R) Platinum 8481C"
    )


def test_a_missing_feature_is_another_cpu(tmp_path: Path) -> None:
    assert host_cpu(cpu(tmp_path, "f1", X86.format(number=0, flags="avx2 avx512f"))) != host_cpu(
        cpu(tmp_path, "f2", X86.format(number=0, flags="avx2"))
    )


def test_cores_that_differ_count_for_what_all_have(tmp_path: Path) -> None:
    mixed = X86.format(number=0, flags="avx2 avx512f") + X86.format(number=1, flags="avx2 bmi2")
    assert host_cpu(cpu(tmp_path, "mixed", mixed)).features == ("avx2",)


def test_arm(tmp_path: Path) -> None:
    found = host_cpu(cpu(tmp_path, "arm", ARM))
    assert found.features == ("asimd", "fp", "sve")
    assert found.name.startswith("CPU implementer=0x41,CPU architecture=8,")


@pytest.mark.parametrize("text", ["", "processor : 0\n", "vendor_id : x\nflags :\n", "\x00\xff"])
def test_an_unknown_cpu_bypasses(tmp_path: Path, text: str) -> None:
    with pytest.raises(Bypass) as caught:
        host_cpu(cpu(tmp_path, "odd", text))
    assert caught.value.reason == "target_unknown"


def test_an_unreadable_description_bypasses(tmp_path: Path) -> None:
    with pytest.raises(Bypass):
        host_cpu(tmp_path / "absent")


def test_this_machine() -> None:
    found = host_cpu()
    assert found.name
    assert list(found.features) == sorted(set(found.features))
