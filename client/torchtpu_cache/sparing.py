"""Warnings that say a thing once a minute, however often it happens; the counters have the number."""

from __future__ import annotations

import logging
import threading
from typing import Final

from torchtpu_cache_core.clock import SYSTEM_CLOCK, Clock
from torchtpu_cache_core.perprocess import PerProcess

_PAUSE_SECONDS: Final = 60.0


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()  # guards said
        self.said: dict[str, float] = {}


class SparingLog:
    """Passes the first warning of a topic on, then at most one a minute. Thread-safe, and safe to use after a fork.

    Topics must be bounded: a tier and a kind of failure, never a key or a path.
    """

    def __init__(self, log: logging.Logger, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log = log
        self._clock = clock
        self._state = PerProcess(_State)

    def warning(self, topic: str, message: str, *arguments: object) -> None:
        """Logs `message` unless its topic was heard within the last minute."""
        now = self._clock.monotonic()
        state = self._state.get()
        with state.lock:
            if now - state.said.get(topic, float("-inf")) < _PAUSE_SECONDS:
                return
            state.said[topic] = now
        self._log.warning(message, *arguments)
