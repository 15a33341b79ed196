"""Every drill in its short form; `make drills` runs them in full."""

from __future__ import annotations

import pytest

from support.campaign import figures, names
from support.figures import Size


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", names("drills"))
def test_the_short_drill_holds(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(figures("drills", name, Size.SHORT))
    with capsys.disabled():
        print("", *(f"  {figure.to_json()}" for figure in found), sep="\n")
    assert [figure for figure in found if not figure.ok] == []
