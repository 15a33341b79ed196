"""The reporting of drills and benchmarks: a figure that falls short, and a module that fails, must be seen."""

from __future__ import annotations

import json
import math
import re
import sys
import types

import pytest

from support import campaign
from support.figures import Figure, Size


def test_a_line_says_name_value_unit_bar_and_whether_it_holds() -> None:
    line = json.loads(Figure.at_most("warm.disk", 1.23456, "ratio", 1.15, rounds=7).to_json())
    assert line == {"name": "warm.disk", "value": 1.235, "unit": "ratio", "bar": "<= 1.15", "ok": False, "rounds": 7}


@pytest.mark.parametrize(
    ("figure", "ok"),
    [
        (Figure.at_most("a", 1.15, "ratio", 1.15), True),
        (Figure.at_most("a", math.nan, "ratio", 1.15), False),
        (Figure.at_least("a", 0.9, "ratio", 0.9), True),
        (Figure.at_least("a", math.nan, "ratio", 0.9), False),
        (Figure.none_of("a", 0, 100), True),
        (Figure.none_of("a", 1, 100), False),
        (Figure.none_of("a", 0, 0), False),
        (Figure.told("a", 5, "ms"), True),
    ],
)
def test_bars(figure: Figure, ok: bool) -> None:
    assert figure.ok is ok
    json.loads(figure.to_json())


@pytest.mark.parametrize(
    ("found", "code"),
    [([Figure.at_most("a", 1, "ms", 2)], 0), ([Figure.at_most("a", 3, "ms", 2)], 1), ([], 1), (None, 1)],
    ids=["holds", "falls short", "no figure", "fails"],
)
def test_the_exit_code(
    found: list[Figure] | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("drills.made")

    def run(size: Size) -> list[Figure]:
        if found is None:
            raise OSError("no")
        return found

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "drills.made", module)
    monkeypatch.setattr(campaign, "names", lambda package: ["made", "other"])
    assert campaign.main(["drills", "--only", "made", "--short"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["ok"] is (code == 0)
    assert [line["name"] for line in lines[1:]] == (["made.seconds"] if found else [])
    assert ("error" in lines[0]) is not bool(found)
    for line in lines:
        assert (line["size"], line["cpus"] > 0, line["load"] >= 0) == ("short", True, True)
        assert re.fullmatch("[0-9a-f]{12}[+]?", line["commit"])


@pytest.mark.parametrize(("constant", "block"), [(17, "True"), (4, "seeded(17)")])
def test_a_failure_names_the_seed(constant: int, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("drills.made")
    word = "with" if "(" in block else "if"
    exec(
        "from support.figures import seeded\n"
        f"SEED = {constant}\ndef run(size):\n    {word} {block}:\n        raise OSError('no')\n    yield",
        module.__dict__,
    )
    monkeypatch.setitem(sys.modules, "drills.made", module)
    (figure,) = campaign.figures("drills", "made", Size.SHORT)
    assert figure.more == {"error": "OSError: no", "seed": 17}


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["drills", "--only", "nothing"]) == 2
    assert "no figures are called 'nothing'" in capsys.readouterr().err
