"""Figures as tables of a document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.figures import Figure

SCRIPT = Path(__file__).parents[2] / "scripts" / "figures_table.py"

DOCUMENT = """# Figures
<!-- figures of hit -->
| not yet |
<!-- end -->
between
<!-- figures of kill -->
| not yet |
<!-- end -->
"""


def run(lines: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(lines), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def written(folder: Path, *figures: Figure) -> Path:
    path = folder / "figures.jsonl"
    path.write_text("".join(figure.to_json() + "\n" for figure in figures))
    return path


def test_a_table_shows_each_figure_once_as_it_was_last(tmp_path: Path) -> None:
    lines = written(
        tmp_path,
        Figure.at_most("hit.disk", 9.0, "ratio", 1.15),
        Figure.none_of("hit.wrong", 0, 100_000),
        Figure.at_most("hit.disk", 1.2, "ratio", 1.15, rounds=1500, spread=[1.5, 1, 2], why="a | b"),
        Figure.told("hit.ms", 35.5, "ms"),
        Figure.told("hit.seconds", 812.3, "s"),
    )
    answer = run(lines)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "| figure | measured | bar | | with |",
        "|---|---|---|---|---|",
        "| `hit.disk` | 1.2 ratio | <= 1.15 | **falls short** | rounds 1,500, spread 1-2, why a \\| b |",
        "| `hit.wrong` | 0 of 100,000 | = 0 | holds |  |",
        "| `hit.ms` | 35.5 ms |  |  |  |",
    ]


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        (
            {"what": "hits that were wrong", "parts": dict.fromkeys("abcdef", 2.0)},
            "hits that were wrong, parts (a 2; b 2; c 2; d 2; e 2; ...)",
        ),
        ({"bare_ms": 40.1, "bare_quartiles_ms": [29.2, 183.2]}, "bare 40.1 ms, bare quartiles 29.2-183.2 ms"),
        (
            {"died_before": {"fsync": 79, "mkdir": 0, "unlink": 51}, "seed": 50000},
            "died before (fsync 79; unlink 51), seed 50000",
        ),
        (
            {"kinds": {"put": 0}, "first": [], "findings": ["one", "two"], "is_quick": True},
            "findings one, is quick yes",
        ),
        (
            {"media": {"disk": [1466, "huge"], "spool": {"a": 1}}, "log": "two\nlines"},
            "media (disk 1,466), log two lines",
        ),
        ({"log": "x" * 500}, "log " + "x" * 97 + "..."),
        (dict.fromkeys("abcde", "y" * 50), ", ".join(f"{name} {'y' * 50}" for name in "ab") + ", ..."),
    ],
)
def test_what_explains_a_figure_is_readable_and_short(tmp_path: Path, more: dict[str, Any], shown: str) -> None:
    row = run(written(tmp_path, Figure.told("hit.ms", 1, "ms", **more))).stdout.splitlines()[-1]
    assert row == f"| `hit.ms` | 1 ms |  |  | {shown} |"


def test_a_failure_is_shown_and_told_until_a_later_run_ends(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    failure = Figure("hit", float("nan"), "", "it runs", False, {"error": "OSError: no", "seed": 7})
    answer = run(written(tmp_path, Figure.told("hit.ms", 1, "ms"), failure), "--into", str(document))
    assert (answer.returncode, answer.stderr) == (1, "hit failed: OSError: no\n")
    assert "| `hit` | failed: OSError: no | it runs | **failed** | seed 7 |\n" in document.read_text()
    again = written(tmp_path, failure, Figure.told("hit.ms", 2, "ms"), Figure.told("hit.seconds", 3, "s"))
    answer = run(again, "--into", str(document))
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "failed" not in document.read_text()


@pytest.mark.parametrize(("seconds", "told"), [(45.4, "45 s"), (812, "14 min"), (9000, "2.5 h")])
def test_below_a_table_stands_how_long_it_took_and_on_what(tmp_path: Path, seconds: float, told: str) -> None:
    document, lines = tmp_path / "document.md", tmp_path / "figures.jsonl"
    document.write_text(DOCUMENT)
    figures = Figure.told("hit.ms", 1, "ms"), Figure.told("hit.seconds", seconds, "s")
    around = {"size": "full", "cpus": 2, "commit": "0123456789ab"}
    lines.write_text(
        "".join(figure.to_json(load=load, **around) + "\n" for figure, load in zip(figures, (1, 0.5), strict=True))
    )
    assert run(lines, "--into", str(document)).returncode == 0
    below = f"|\n\nAbout {told}, 2 CPUs at a load average of 0.5-1, commit `0123456789ab`.\n<!-- end -->\nbetween"
    assert below in document.read_text()


def test_a_document_gets_the_tables_that_there_are_figures_for(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    lines = written(tmp_path, Figure.at_most("hit.disk", 1.0, "ratio", 1.15))
    for change in ("changed", "unchanged"):  # again, and it is the same
        answer = run(lines, "--into", str(document))
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout == f"{document}: 1 figures, {change}\n"
        text = document.read_text()
        assert "| `hit.disk` | 1 ratio | <= 1.15 | holds |  |\n<!-- end -->\nbetween\n" in text
        assert text.count("not yet") == 1
        assert text.count("<!-- end -->") == 2


def test_figures_without_a_place_are_told(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    answer = run(written(tmp_path, Figure.told("strange.ms", 1, "ms")), "--into", str(document))
    assert answer.returncode == 1
    assert "no place for the figures of strange" in answer.stderr
    assert document.read_text() == DOCUMENT
