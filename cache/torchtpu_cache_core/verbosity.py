"""How much the loggers of this project say."""

from __future__ import annotations

import logging
from typing import Final

_LOGGERS: Final = ("torchtpu_cache", "torchtpu_cache_core", "torchtpu_cache_server")


def say_more() -> None:
    """Has lines at INFO said too, as `-v` and the setting `verbose` ask for."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
