"""What people read: tables that fit, and numbers with their units."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from torchtpu_cache.cli.output import counted, human_limit, print_table


def test_a_piped_table_has_no_blanks_at_its_ends_and_a_rule_as_wide_as_its_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(["name", "size", "note"], [["a", "1 B", "short"], ["b", "12 kB", "-"]], right=frozenset({1}))
    assert capsys.readouterr().out == (
        "name  size note\n"
        "────────────────\n"
        "a      1 B short\n"
        "b    12 kB -\n"
    )  # fmt: skip


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes standard output a terminal of so many columns."""

    def make(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")

    return make


def seen(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a terminal, without what makes some of them bold."""
    return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_texts_fold_between_words_and_numbers_stay_whole(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str], width: int
) -> None:
    terminal(width)
    print_table(["file", "time", "size"], [["a word " * 12, "123 ms", "31.8 kB"]], right=frozenset({1, 2}))
    lines = seen(capsys)
    assert max(map(len, lines)) <= width
    assert lines[2].endswith(" 123 ms 31.8 kB")
    assert len(lines) > 3
    assert sum(line.count("word") for line in lines) == 12


@pytest.mark.parametrize("word", ["ttc1-" + "0" * 64, "/home/some-body/a long/way to/" + "x" * 90])
def test_no_key_and_no_path_is_cut(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str], word: str
) -> None:
    terminal(60)
    print_table(["key", "", "note"], [[f"it is {word} here", "ok", "of some words that fold " * 3]])
    lines = seen(capsys)
    assert all(any(part in line for line in lines) for part in word.split())
    assert len(lines) > 3


def test_a_pipe_gets_its_lines_whole_whatever_the_width_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(["text"], [["word " * 500]])
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_terminal_too_narrow_for_the_numbers_loses_none(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(10)
    print_table(["file", "time", "size"], [["name", "123 ms", "31.8 kB"]], right=frozenset({1, 2}))
    assert "name 123 ms 31.8 kB" in seen(capsys)


def test_cells_are_text_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["[red]a"], [["[bold]b"]])
    assert capsys.readouterr().out.splitlines() == ["[red]a", "───────", "[bold]b"]


def test_a_table_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [])
    assert capsys.readouterr().out.splitlines() == ["a b", "───"]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (20 << 30, "20 GiB"),
        (1 << 40, "1 TiB"),
        (512 << 20, "512 MiB"),
        (50 * 10**9, "50 GB"),
        (1_500_000_000, "1500 MB"),
        (123_456, "123 kB"),
        (0, "0 B"),
    ],
)
def test_a_limit_as_people_write_it(size: int, shown: str) -> None:
    assert human_limit(size) == shown


def test_one_and_many() -> None:
    assert [counted(number, "entry", "entries") for number in (0, 1, 2000)] == ["0 entries", "1 entry", "2,000 entries"]
    assert counted(2, "program") == "2 programs"
