"""What people read: tables that fit, and numbers with their units."""

from __future__ import annotations

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


@pytest.mark.parametrize("width", [40, 60, 80])
def test_texts_fold_and_numbers_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(["file", "time", "size"], [["x" * 70, "123 ms", "31.8 kB"]], right=frozenset({1, 2}))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[2].endswith("x 123 ms 31.8 kB")
    assert sum(line.count("x") for line in lines) == 70


def test_a_terminal_too_narrow_for_the_numbers_loses_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    print_table(["file", "time", "size"], [["name", "123 ms", "31.8 kB"]], right=frozenset({1, 2}))
    assert "name 123 ms 31.8 kB" in capsys.readouterr().out


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
