"""Figures as tables of a document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
        Figure.at_most("hit.disk", 1.2, "ratio", 1.15, rounds=1500, spread=[1, 2], why="a | b"),
        Figure.told("hit.ms", 35.5, "ms"),
        Figure("hit", float("nan"), "", "it runs", False, {"error": "x" * 500}),
    )
    answer = run(lines)
    assert answer.returncode == 0, answer.stderr
    head, _, *rows = answer.stdout.splitlines()
    assert head == "| figure | measured | bar | | with |"
    assert rows[:3] == [
        "| `hit.disk` | 1.2 ratio | <= 1.15 | **falls short** | rounds 1,500, why a \\| b |",
        "| `hit.wrong` | 0 of 100,000 | = 0 | holds |  |",
        "| `hit.ms` | 35.5 ms |  |  |  |",
    ]
    assert rows[3].startswith("| `hit` | - | it runs | **falls short** | error xxx")
    assert len(rows[3]) < 250


def test_a_document_gets_the_tables_that_there_are_figures_for(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text(DOCUMENT)
    lines = written(tmp_path, Figure.at_most("hit.disk", 1.0, "ratio", 1.15))
    for _ in range(2):  # again, and it is the same
        answer = run(lines, "--into", str(document))
        assert answer.returncode == 0, answer.stderr
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
