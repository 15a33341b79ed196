from __future__ import annotations

from typing import Any

import pytest

from torchtpu_cache.compilers.registry import compiler_kind
from torchtpu_cache.compilers.topology import EXAMPLES, check_topology_name, target_parts
from torchtpu_cache_core.errors import InvalidRequest


@pytest.mark.parametrize("name", [*EXAMPLES, "v5p:16x20x28", "v4:4x4x8_twisted", "v4:4x4x8_untwisted", "v9z:2x2"])
def test_names_of_the_grammar_are_left_to_libtpu(name: str) -> None:
    assert check_topology_name(name) == name
    assert compiler_kind(name) == "tpu"


@pytest.mark.parametrize(
    "name",
    ["", "tpu", "v5e", "v5e:", "v5e:2", "v5e:0x2", "v5e:2x2x2x2", "V5E:2x2", "v5e:2x2\n", "v5e:2x2_twist", "v5e:٢x2",
     "../v5e:2x2", "v5e:2x2 ", "CPU", "cpu:1", "v5e:99999x2", "gpu"],
)  # fmt: skip
def test_other_names_are_refused_with_some_that_are_accepted(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is no target; try cpu, .*v5e:2x2"):
        compiler_kind(name)


@pytest.mark.parametrize(
    ("name", "meant"), [("v7x:2x2x1", "tpu7x:2x2x1"), ("v5litepod:2x2", "v5e:2x2"), ("v5:2x2x1", "v5p:2x2x1")]
)
def test_a_product_name_gets_a_hint(name: str, meant: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"did you mean {meant}\?"):
        check_topology_name(name)


def test_a_name_cannot_ask_for_more_chips_than_memory_holds() -> None:
    with pytest.raises(InvalidRequest, match="more than 131,072 chips"):
        check_topology_name("v5p:9999x9999x9999")


def device(id_: int, **attributes: Any) -> dict[str, Any]:
    return {"id": id_, "process_index": 0, "kind": "TPU v5 lite", "attributes": attributes}


BASE: dict[str, Any] = {
    "platform": "tpu",
    "version": "TFRT TPU v5 lite\nBuilt on Nov 5 2026 cl/1",
    "attributes": {"wrap": (0, 0, 0), "twist": 0},
    "devices": [device(0, coords=(0, 0, 0)), device(1, coords=(1, 0, 0))],
    "fingerprint": 0xE0,
}


def test_the_parts_of_a_description() -> None:
    assert target_parts(**BASE) == {
        "platform": "tpu",
        "platform_version": "TFRT TPU v5 lite / Built on Nov 5 2026 cl/1",
        "device_kind": "TPU v5 lite",
        "device_count": "2",
        "topology": '{"twist":0,"wrap":[0,0,0]}',
        "devices": '[[0,0,"TPU v5 lite",{"coords":[0,0,0]}],[1,0,"TPU v5 lite",{"coords":[1,0,0]}]]',
        "fingerprint": "00000000000000e0",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"platform": "tpu2"},
        {"version": "TFRT TPU v5 lite\nBuilt on Nov 6 2026 cl/2"},
        {"attributes": {"wrap": (1, 0, 0), "twist": 0}},
        {"devices": list(reversed(BASE["devices"]))},
        {"devices": [device(0, coords=(0, 0, 0)), device(1, coords=(0, 1, 0))]},
        {"devices": [*BASE["devices"], device(2, coords=(0, 1, 0))]},
        {"devices": [{**d, "process_index": d["id"]} for d in BASE["devices"]]},
        {"devices": [{**d, "kind": "TPU v6 lite"} for d in BASE["devices"]]},
        {"fingerprint": 1},
        {"fingerprint": None},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_fact_of_a_description_counts(change: dict[str, Any]) -> None:
    assert target_parts(**{**BASE, **change}) != target_parts(**BASE)


def test_the_order_of_attributes_does_not_count() -> None:
    turned = {**BASE, "attributes": dict(reversed(BASE["attributes"].items()))}
    assert target_parts(**turned) == target_parts(**BASE)


def test_many_devices_are_kept_as_a_digest() -> None:
    many = [device(i, coords=(i, 0, 0)) for i in range(1000)]
    devices = target_parts(**{**BASE, "devices": many})["devices"]
    assert devices.startswith("sha256:")
    assert len(devices) == 71
    assert devices != target_parts(**{**BASE, "devices": many[::-1]})["devices"]
