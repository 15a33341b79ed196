"""What a job's standard error gets of the loggers: lines that say whose they are, where no application prints them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ABOUT = """
import logging, sys
import torchtpu_cache.node, torchtpu_cache.api
log = logging.getLogger("torchtpu_cache.made")
{before}
log.warning("one %s", "warning")
log.info("only with more words")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("two\\nlines")
"""
NAMED = "torchtpu-cache: "


def said(before: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ABOUT.format(before=before)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_each_line_says_whose_it_is_where_nobody_configured_logging() -> None:
    lines = said("")
    assert lines[:3] == [f"{NAMED}one warning", f"{NAMED}two", f"{NAMED}lines"]
    assert lines[-1] == f"{NAMED}ZeroDivisionError: division by zero"
    assert all(line.startswith(NAMED) for line in lines)


@pytest.mark.parametrize(
    "before",
    [
        "logging.basicConfig(format='mine %(message)s')",
        "logging.getLogger('torchtpu_cache').addHandler(logging.StreamHandler())",
        "log.addHandler(logging.StreamHandler())",
    ],
)
def test_an_application_with_handlers_prints_our_records_itself_and_once(before: str) -> None:
    lines = said(before)
    assert lines[0] in ("mine one warning", "one warning")
    assert sum("warning" in line for line in lines) == 1
    assert not any(line.startswith(NAMED) for line in lines)


@pytest.mark.parametrize("before", ["logging.lastResort = None", "sys.stderr = None"])
def test_silence_is_kept(before: str) -> None:
    assert said(before) == []


def test_a_level_of_the_application_counts() -> None:
    assert f"{NAMED}only with more words" in said("logging.getLogger('torchtpu_cache').setLevel(logging.INFO)")


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_setting_has_a_job_say_more(value: str, tmp_path: Path) -> None:
    source = (
        "import logging, torchtpu_cache.api as a; a.default_assembly(); logging.getLogger('torchtpu_cache').info('x')"
    )
    environ = {**os.environ, "TORCHTPU_CACHE_VERBOSE": value, "TORCHTPU_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", source], env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == (f"{NAMED}x\n" if value == "1" else "")


def test_more_is_said_by_all_our_loggers_and_no_others() -> None:
    source = (
        "import logging, torchtpu_cache_core.verbosity as v; v.say_more();"
        " print([n for n in ('', '_core', '_server') if logging.getLogger('torchtpu_cache' + n).level == logging.INFO],"
        " logging.getLogger().level == logging.WARNING)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "['', '_core', '_server'] True\n"
