"""The other commands: what they show, what they remove, and their exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import ttc
from support.service import running_service

MODULES = ("jax_mlp4_sgd_step.mlirbc", "torch_mlp_fwd.mlirbc")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with two entries; tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    corpus = Path(__file__).parents[2] / "data" / "corpus"
    answer = ttc("compile", *(corpus / name for name in MODULES), "--cache-dir", folder)
    assert answer.code == 0, answer.err
    return folder


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "cache"
    subprocess.run(["cp", "-a", str(filled), str(copy)], check=True)
    return copy


def entry_file(cache: Path, key: str) -> Path:
    (path,) = cache.rglob(key)
    return path


def test_ls_show_rm(cache: Path) -> None:
    entries = ttc("cache", "ls", "--json", "--cache-dir", cache).json["entries"]
    assert len(entries) == 2
    table = ttc("cache", "ls", "--cache-dir", cache).out
    first, second = (entry["key"] for entry in entries)
    for key in (first, second):
        assert key[:17] in table
    shown = ttc("cache", "show", first[:20], "--json", "--cache-dir", cache).json
    assert shown["key"] == first
    assert shown["compiled_here"] is True
    assert {"target.cpu_features", "target.compiler", "program"} <= {part["name"] for part in shown["components"]}
    assert "target.cpu_features" in ttc("cache", "show", first, "--cache-dir", cache).out
    removed = ttc("cache", "rm", first[5:25], "--json", "--cache-dir", cache)
    assert (removed.code, removed.json["removed"]) == (0, [first])
    assert ttc("cache", "rm", first, second, "--cache-dir", cache).code == 3
    assert ttc("cache", "rm", first, "--cache-dir", cache).code == 1
    assert ttc("cache", "ls", "--cache-dir", cache).out == "no entries\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["cache", "show", "ttc1-" + "0" * 64], 1, "no such entry"),
        (["cache", "show", "ttc1-"], 2, "2 keys"),
        (["cache", "show", "../../x"], 1, "`torchtpu-cache cache ls` shows the keys"),
        (["cache", "ls", "--at-remote"], 2, "no remote is configured"),
        (["cache", "ls", "--at-remote", "--remote", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
        (["dev", "diff", "nothing here", "ttc1-"], 1, "no such file"),
        (["dev", "key", "/no/such/file"], 2, "No such file"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(cache: Path, arguments: list[str], code: int, says: str) -> None:
    answer = ttc(*arguments, "--cache-dir", cache)
    assert answer.code == code, answer.err
    assert says in answer.one_sentence()


def test_verify_finds_sets_aside_and_then_is_content(cache: Path, corpus: Path) -> None:
    assert ttc("cache", "verify", "--cache-dir", cache).code == 0
    key = ttc("cache", "ls", "--json", "--cache-dir", cache).json["entries"][0]["key"]
    path = entry_file(cache, key)
    raw = bytearray(path.read_bytes())
    raw[-40] ^= 0x10
    path.write_bytes(raw)
    found = ttc("cache", "verify", "--json", "--cache-dir", cache)
    assert found.code == 1
    assert [bad["key"] for bad in found.json["bad"]] == [key]
    repaired = ttc("cache", "verify", "--repair", "--json", "--cache-dir", cache)
    assert (repaired.code, repaired.json["bad"][0]["set_aside"]) == (0, True)
    after = ttc("cache", "verify", "--json", "--cache-dir", cache).json
    assert (after["ok"], after["entries"], len(after["quarantined"])) == (True, 1, 1)
    tiers = [
        line["tier"]
        for line in ttc("compile", *(corpus / name for name in MODULES), "--json", "--cache-dir", cache).lines
    ]
    assert sorted(tiers) == ["compiled", "disk"]


def test_gc_keeps_the_limits(cache: Path) -> None:
    answer = ttc("cache", "gc", "--json", "--cache-dir", cache, environ={"TORCHTPU_CACHE_MAX_DISK_ENTRIES": "1"})
    assert answer.code == 0
    assert (answer.json["entries"], answer.json["evicted"]) == (1, 1)


def test_the_remote_can_be_listed_shown_and_emptied(tmp_path: Path, corpus: Path) -> None:
    with running_service(tmp_path / "service") as service:
        at = ["--at-remote", "--remote", service.url, "--cache-dir", tmp_path / "cache"]
        key = ttc("compile", corpus / MODULES[0], "--json", *at[1:]).json["key"]
        assert [entry["key"] for entry in ttc("cache", "ls", "--json", *at).json["entries"]] == [key]
        assert ttc("cache", "show", key[:16], "--json", *at).json["manifest"]["key"] == key
        shown = ttc("cache", "show", key, *at).out
        assert re.search(rf"^manifest\.key +{key}$", shown, re.MULTILINE)
        assert re.search(r"^compiled_here +(yes|no)$", shown, re.MULTILINE)
        assert re.search(r"^compile +[\d.]+ m?s$", shown, re.MULTILINE)
        assert "{" not in shown
        assert ttc("cache", "rm", key, *at).code == 0
        assert ttc("cache", "ls", "--json", *at).json["entries"] == []


def test_key_and_diff_name_what_differs(cache: Path, corpus: Path) -> None:
    one, two = corpus / MODULES[0], corpus / MODULES[1]
    common = ["--cache-dir", cache]
    explained = ttc("dev", "key", one, "--explain", *common)
    assert re.match(r"ttc1-[0-9a-f]{64}\n", explained.out)
    assert "target.cpu_features" in explained.out
    key = explained.out.split()[0]
    assert ttc("dev", "diff", one, one, *common).code == 0
    files = ttc("dev", "diff", one, two, "--json", *common)
    assert files.code == 1
    assert [difference["name"] for difference in files.json["differences"]] == ["program"]
    entry_and_file = ttc("dev", "diff", key, one, *common)
    assert entry_and_file.code == 0, entry_and_file.out
    flagged = ttc("dev", "diff", key, one, "--json", *common, environ={"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"})
    names = [difference["name"] for difference in flagged.json["differences"]]
    assert len(names) == 1
    assert "xla_cpu_enable_fast_math" in names[0]


def test_status_and_doctor_when_all_is_well(tmp_path: Path, cache: Path) -> None:
    with running_service(tmp_path / "service") as service:
        at = ["--remote", service.url, "--cache-dir", cache]
        status = ttc("status", "--json", *at).json
        assert status["disk"]["entries"] == 2
        assert status["remote"]["ok"] is True
        assert service.url in ttc("status", *at).out
        doctor = ttc("doctor", "--json", *at)
        assert doctor.code == 0, doctor.out
        checks = {check["name"]: check["status"] for check in doctor.json["checks"]}
        assert set(checks.values()) <= {"ok", "warning"}
        assert checks["remote"] == checks["cache folder"] == checks["canonicaliser"] == "ok"
        assert ttc("cache", "ls", "--json", "--at-remote", *at).json["entries"] == [], "the canary stayed"
        assert ttc("doctor", *at).out.count("ok") >= 5


def test_doctor_fails_where_something_is_wrong(tmp_path: Path, cache: Path) -> None:
    dead = ttc("doctor", "--json", "--remote", "http://127.0.0.1:9", "--cache-dir", cache)
    assert dead.code == 1
    assert [check["name"] for check in dead.json["checks"] if check["status"] == "failed"] == ["remote"]
    blocked = tmp_path / "file"
    blocked.write_text("")
    folder = ttc("doctor", "--json", "--cache-dir", blocked)
    assert folder.code == 1
    assert [check["name"] for check in folder.json["checks"] if check["status"] == "failed"] == ["cache folder"]
    settings = ttc("doctor", "--json", environ={"TORCHTPU_CACHE_NONSENSE": "1"})
    assert settings.code == 1
    assert settings.json["checks"][0]["name"] == "settings"


def test_config_show_says_where_values_come_from(cache: Path) -> None:
    answer = ttc("config", "show", "--origin", "--json", environ={"TORCHTPU_CACHE": "read"})
    assert answer.json["settings"]["mode"] == "read"
    assert answer.json["origins"]["mode"] == "variable TORCHTPU_CACHE"
    table = ttc("config", "show", environ={"TORCHTPU_CACHE_MAX_MEMORY_BYTES": "1.5GB"}).out
    assert re.search(r"max_disk_bytes +20 GiB +limit of the disk tier", table)
    assert re.search(r"max_memory_bytes +1500 MB ", table)
    assert re.search(r"jax +false ", table)
    shown = ttc("config", "show", "--origin", environ={"TORCHTPU_CACHE": "read"}).out
    assert re.search(r"mode +read +variable TORCHTPU_CACHE", shown)


def test_version_and_help() -> None:
    assert re.fullmatch(r"torchtpu-cache \d+\.\d+\.\d+\n", ttc("--version").out)
    text = ttc("--help").out
    for command in ("compile", "demo", "status", "doctor", "serve", "cache", "dev", "config"):
        assert command in text


def test_a_reader_that_takes_the_first_line_only_hears_no_complaint(cache: Path) -> None:
    script = '"$0" -m torchtpu_cache.cli.main cache ls --cache-dir "$1" | head -1'
    answer = subprocess.run(
        ["sh", "-c", script, sys.executable, str(cache)], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.startswith("key ")
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:  # a pipe that surely has no reader
        gone.wait(timeout=10)
        late = subprocess.run(
            [sys.executable, "-m", "torchtpu_cache.cli.main", "cache", "ls", "--cache-dir", str(cache)],
            stdout=gone.stdin,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert answer.stderr == ""
    assert late.stderr == b""


def test_a_table_where_output_is_ascii(cache: Path) -> None:
    answer = ttc("cache", "ls", "--cache-dir", cache, environ={"PYTHONIOENCODING": "ascii"})
    assert answer.code == 0, answer.err
    assert re.fullmatch("-+", answer.out.splitlines()[1])


def test_help_of_serve_names_its_defaults() -> None:
    text = ttc("serve", "--help").out
    for default in ("127.0.0.1:8077", ".local/share/torchtpu-cache", "20GiB"):
        assert default in text


def test_a_reader_that_goes_away_is_no_traceback(cache: Path) -> None:
    command = [sys.executable, "-m", "torchtpu_cache.cli.main", "cache", "ls", "--json", "--cache-dir", str(cache)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert b"Traceback" not in err


def test_an_empty_text_is_no_key(tmp_path: Path) -> None:
    """Where a shell variable is unset, nothing may go."""
    for words in (("cache", "rm", ""), ("cache", "show", " "), ("dev", "diff", "", "")):
        answer = ttc(*words, environ={"TORCHTPU_CACHE_DIR": str(tmp_path / "cache")})
        assert answer.code == 2
        assert "an empty text is no key" in answer.one_sentence()
