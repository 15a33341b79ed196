"""TPU topologies: their names (`v5e:2x2`, `v5p:2x2x1`, `v4:4x4x8_twisted`), and what of a description a key needs.

The grammar of names is a part of what libtpu accepts (chip, colon, chip counts per dimension, optional twist), bounded
so that no name can make it describe a topology that fills the memory. Which chips exist is libtpu's to say.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchtpu_cache_core.errors import InvalidRequest
from torchtpu_cache_core.key import MAX_TEXT_BYTES

_NAME: Final = re.compile(
    r"(?P<chip>[a-z][a-z0-9]{0,15}):(?P<bounds>[1-9][0-9]{0,3}(?:x[1-9][0-9]{0,3}){1,2})(_(?:un)?twisted)?"
)
_MAX_CHIPS: Final = 1 << 17
"""Well beyond the largest slice that is sold (9,216 chips)."""

# What people write after a product name or an accelerator type, and what libtpu calls it.
_MEANT: Final = {"v7x": "tpu7x", "v7": "tpu7x", "v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e", "v5": "v5p"}

EXAMPLES: Final = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
"""One accepted name per generation."""


def check_topology_name(name: str) -> str:
    """`name`, if it has the form of a topology's name.

    Raises:
        InvalidRequest: it has not; the message names some that are accepted.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidRequest(f"{name[:80]!r} is no target; try cpu, {', '.join(EXAMPLES)}")
    chip, bounds = match["chip"], match["bounds"]
    if meant := _MEANT.get(chip):
        raise InvalidRequest(f"libtpu knows no chip {chip!r}; did you mean {meant}:{name.partition(':')[2]}?")
    if math.prod(int(bound) for bound in bounds.split("x")) > _MAX_CHIPS:
        raise InvalidRequest(f"{name!r} has more than {_MAX_CHIPS:,} chips, which no TPU slice has")
    return name


def refused(name: str, reason: str) -> InvalidRequest:
    """The error for a well-formed name that libtpu itself refuses, with libtpu's reason."""
    return InvalidRequest(
        f"libtpu refuses the target {name}: {reason}; accepted are, for example, {', '.join(EXAMPLES)}"
    )


def platform_version(version: str) -> str:
    """A plugin's version on one line, so that a key shows it; libtpu's has two."""
    return " / ".join(line.strip() for line in version.splitlines() if line.strip())


def target_parts(
    *,
    platform: str,
    version: str,
    attributes: Mapping[str, Any],
    devices: Sequence[Mapping[str, Any]],
    fingerprint: int | None,
) -> dict[str, str]:
    """The target parts that a PJRT topology description gives, alike for a live client's and one made by name.

    The topology's name is no part: `v5e:2x2` and `v5e:2x2x1` are one topology. What is said of each device stays:
    it is not proved that libtpu's output is the same for other coordinates, another order or another division into
    processes. The memory limit stays: XLA trades time for space under it. The fingerprint stays: it may cover what no
    attribute shows.

    Args:
        platform: the topology's platform name.
        version: its platform version, as the plugin tells it.
        attributes: of the topology (wrap, twist, memory limit, ...).
        devices: of each device `id`, `process_index`, `kind` and `attributes` (coords, core_on_chip, ...), in order.
        fingerprint: the plugin's own 64-bit fingerprint of the topology; None where it has none.
    """
    described = [[d["id"], d["process_index"], d["kind"], d["attributes"]] for d in devices]
    return {
        "platform": platform,
        "platform_version": platform_version(version),
        "device_kind": ", ".join(sorted({str(d["kind"]) for d in devices})),
        "device_count": str(len(devices)),
        "topology": _short(attributes),
        "devices": _short(described),
        "fingerprint": "none" if fingerprint is None else f"{fingerprint:016x}",
    }


def _short(value: object) -> str:
    """JSON with sorted keys; its digest where it is too long to be read. No JSON looks like `sha256:`."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return text if len(text) <= MAX_TEXT_BYTES else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
