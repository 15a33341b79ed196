"""A signal's handler runs between any two lines of its thread, and may ask the cache: it must never wait for itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from support.fakes import FakeCompiler, request
from support.nodes import node
from torchtpu_cache.sparing import SparingLog
from torchtpu_cache_core.names import DEFAULT_NAMESPACE
from torchtpu_cache_core.singleflight import SingleFlight
from torchtpu_cache_core.stores.disk import DiskStore

_OURS = ("torchtpu_cache", "torchtpu_cache_core")
_SECONDS = 60


def ends(work: Callable[[], object], interruption: Callable[[], object]) -> int:
    """Does `work` in a thread, interrupted before each line of ours; how often it was. Fails where that never ends."""
    count = 0

    def handler(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        if event == "line":
            sys.settrace(None)
            try:
                interruption()
                count += 1
            finally:
                sys.settrace(tracer)
        return handler

    def tracer(frame: FrameType, event: str, argument: object) -> Any:
        return handler if frame.f_globals.get("__name__", "").startswith(_OURS) else None

    def run() -> None:
        sys.settrace(tracer)
        try:
            work()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_SECONDS)
    assert not thread.is_alive(), "it waits for itself"
    return count


def test_a_handler_may_ask_a_node_in_the_middle_of_a_look_up(tmp_path: Path) -> None:
    with DiskStore(tmp_path, DEFAULT_NAMESPACE, limit_bytes=1 << 30, limit_entries=1000, min_free_bytes=0) as disk:
        asked = node(disk=disk)
        compiler = FakeCompiler()
        asked.get_or_compile(request(b"known"), compiler)
        asked.flush()

        def interruption() -> None:
            assert asked.get_or_compile(request(b"known"), compiler).executable
            asked.counters.snapshot()

        assert ends(lambda: asked.get_or_compile(request(b"new"), compiler), interruption) > 100
        assert ends(lambda: asked.get_or_compile(request(b"known"), compiler), interruption) > 50
        asked.close()


def test_a_handler_may_ask_for_the_very_key_that_its_thread_is_about() -> None:
    flights: SingleFlight[str, int] = SingleFlight()
    answers = []
    assert ends(lambda: flights.do("key", lambda: 1), lambda: answers.append(flights.do("key", lambda: 2)[0])) > 3
    assert set(answers) == {2}


def test_a_handler_may_warn() -> None:
    import logging

    log = SparingLog(logging.getLogger("torchtpu_cache.reentry"))
    assert ends(lambda: log.warning("topic", "text"), lambda: log.warning("topic", "text")) > 3
