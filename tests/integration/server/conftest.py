"""Services for the tests of this folder."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.served import Served, launch


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts services on one data folder, and ends what still runs."""
    started: list[Served] = []

    def begin(*options: str, data_dir: Path = tmp_path / "data", **more: Any) -> Served:
        started.append(launch(data_dir, *options, **more))
        return started[-1]

    yield begin
    for served in started:
        served.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One service for the tests of a module, each of which uses keys of its own."""
    running = launch(tmp_path_factory.mktemp("service") / "data")
    yield running
    assert running.stop() == 0
