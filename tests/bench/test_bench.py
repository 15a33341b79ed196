"""Every benchmark in its short form, so that none rots. On a shared machine their bars decide nothing here."""

from __future__ import annotations

import math

import pytest

from support.campaign import figures, names
from support.figures import Size


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", names("bench"))
def test_the_short_benchmark_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(figures("bench", name, Size.SHORT))
    with capsys.disabled():
        print("", *(f"  {figure.to_json()}" for figure in found), sep="\n")
    assert [figure for figure in found if "error" in figure.more] == []
    assert all(math.isfinite(figure.value) for figure in found)
    # A difference of two medians is below zero where noise is more than the difference.
    assert [figure for figure in found if figure.unit != "ms" and figure.value < 0] == []
