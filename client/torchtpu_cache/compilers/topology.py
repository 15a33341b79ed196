"""Names of TPU topologies: `v5e:2x2`, `v5p:2x2x1`, `tpu7x:2x2x1`, `v4:4x4x8_twisted`.

The grammar is a part of what libtpu accepts (chip, colon, chip counts per dimension, optional twist), bounded so that
no name can make it describe a topology that fills the memory. Which chips exist is libtpu's to say.
"""

from __future__ import annotations

import math
import re
from typing import Final

from torchtpu_cache_core.errors import InvalidRequest

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
