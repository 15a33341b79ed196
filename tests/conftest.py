"""What every test gets: a clean environment, and skips that cannot hide a missing part in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine is no finding.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

# A skip that names a capability says that a store has nothing to test there; any other says that a part is missing.
_CAPABILITY = "capability:"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _CAPABILITY not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped in CI, where every part must be there: {reason}"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No setting of the person who runs the tests reaches one, and none writes into a home."""
    for name in list(os.environ):
        if name.startswith(("TORCHTPU_CACHE", "XLA_", "LIBTPU_", "TPU_", "XDG_")):
            monkeypatch.delenv(name)
    home = tmp_path_factory.getbasetemp() / "home"
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def corpus() -> Path:
    """The folder of real StableHLO modules."""
    return Path(__file__).parent / "data" / "corpus"
