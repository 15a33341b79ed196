"""`torchtpu-cache compile`: StableHLO in, executables out, through every tier and only then XLA."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtpu_cache.cli.options import CacheDir, Json, NamespaceName, OptionsFile, Remote, TargetName, read_config
from torchtpu_cache.cli.output import (
    EXIT_FAILED,
    EXIT_PARTLY,
    EXIT_USAGE,
    console,
    counted,
    fail,
    human_bytes,
    human_seconds,
    note,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from torchtpu_cache.api import CompiledProgram
    from torchtpu_cache.assembly import Assembly

_log = logging.getLogger(__name__)


def compile_files(
    files: Annotated[list[Path], typer.Argument(help="StableHLO modules, MLIR bytecode or text.", metavar="FILE...")],
    target: TargetName = "cpu",
    options: OptionsFile = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the executables into this folder.")] = None,
    remote: Remote = None,
    cache_dir: CacheDir = None,
    namespace: NamespaceName = None,
    as_json: Json = False,
) -> None:
    """Compile StableHLO modules, or get them from the cache.

    Exit code 0: all done; 1: none; 3: some.
    """
    from torchtpu_cache.api import check_target
    from torchtpu_cache.assembly import assemble
    from torchtpu_cache.compilers.registry import compiler_kind

    config = read_config(cache_dir, remote, namespace)
    compiler_kind(target)  # a name that no target can have ends the command before any work
    raw_options = None if options is None else _read(options)
    outputs = _output_paths(files, target, out)
    assembly = assemble(config)
    answers = []
    try:
        check_target(assembly, target)
        with _progress(len(files), as_json) as show:
            for index, file in enumerate(files):
                progress = functools.partial(show, index, file.name)
                progress(0.0)
                answer = _compile_file(assembly, file, target, raw_options, outputs[index], progress)
                _log.info("%s", _told(answer))
                answers.append(answer)
                if as_json:
                    print_json(answer)
        failures = [answer for answer in answers if "error" in answer]
        if not as_json:
            _print_rows([_row(answer) for answer in answers])
            for answer in failures:
                note(f"error: {answer['file']}: {answer['error']}")
        waiting = assembly.node.drain(config.drain_seconds)
        if waiting and config.remote is not None:
            _print_waiting(waiting, config.remote)
        _print_troubles(assembly)
    finally:
        assembly.close()
    if failures:
        raise typer.Exit(EXIT_FAILED if len(failures) == len(files) else EXIT_PARTLY)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"{path}: {error.strerror}", EXIT_USAGE)


def _output_paths(files: list[Path], target: str, out: Path | None) -> list[Path | None]:
    if out is None:
        return [None] * len(files)
    suffix = f".{target.replace(':', '-')}.pjrt"
    paths = [out / f"{file.stem}{suffix}" for file in files]
    twice = {path.name for path in paths if paths.count(path) > 1}
    if twice:
        fail(f"two of the files would both become {sorted(twice)[0]}; compile them into different folders", EXIT_USAGE)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out}: {error.strerror}", EXIT_USAGE)
    return list(paths)


def _compile_file(
    assembly: Assembly,
    file: Path,
    target: str,
    options: bytes | None,
    output: Path | None,
    progress: Callable[[float], None],
) -> dict[str, Any]:
    """The JSON answer for one file; it has an `error` where something went wrong."""
    from torchtpu_cache.api import compile_with
    from torchtpu_cache_core.errors import CacheError

    started = time.monotonic()
    try:
        program = compile_with(assembly, file.read_bytes(), target=target, options=options, progress=progress)
        if output is not None:
            _write(output, program.executable)
        return _answer(file, target, program, output)
    except (CacheError, OSError) as error:
        message = str(error)
        if isinstance(error, OSError):
            reason = error.strerror or message
            message = reason if str(error.filename) == str(file) else f"{error.filename}: {reason}"
        return {"file": str(file), "target": target, "error": message, "seconds": round(time.monotonic() - started, 6)}


def _write(path: Path, executable: bytes | memoryview) -> None:
    """Whole or not at all, so that a full disk leaves no half executable under a good name."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(executable)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _answer(file: Path, target: str, program: CompiledProgram, output: Path | None) -> dict[str, Any]:
    result = program.result
    answer: dict[str, Any] = {
        "file": str(file),
        "target": target,
        "key": result.key,
        "tier": result.tier,
        "seconds": round(result.seconds, 6),
        "executable_bytes": len(result.executable),
        "entry_bytes": result.entry_bytes,
        "compile_seconds": round(result.compile_seconds, 6),
        "seconds_saved": round(result.seconds_saved, 6),
        "digest": result.digest,
    }
    if result.bypassed is not None:
        answer["bypassed"] = result.bypassed
    if output is not None:
        answer["out"] = str(output)
    return answer


def _told(answer: dict[str, Any]) -> str:
    """One file's answer as a line for `--verbose`."""
    took = human_seconds(answer["seconds"])
    if "error" in answer:
        return f"{answer['file']}: failed after {took}: {answer['error']}"
    told = f"{answer['file']}: {answer['tier']} in {took}, key {answer['key'] or '-'}"
    return f"{told}, past the cache: {answer['bypassed']}" if "bypassed" in answer else told


def _row(answer: dict[str, Any]) -> list[str]:
    name = Path(answer["file"]).name
    if "error" in answer:
        return [name, "failed", human_seconds(answer["seconds"]), "-", "-", "-"]
    tier = f"compiled ({answer['bypassed']})" if "bypassed" in answer else str(answer["tier"])
    key = "-" if answer["key"] is None else answer["key"].short
    saved = human_seconds(answer["seconds_saved"]) if answer["seconds_saved"] > 0 else "-"
    return [name, tier, human_seconds(answer["seconds"]), saved, human_bytes(answer["executable_bytes"]), key]


def _print_rows(rows: list[list[str]]) -> None:
    print_table(["program", "from", "seconds", "saved", "executable", "key"], rows, right=frozenset({2, 3, 4}))


def _print_waiting(waiting: int, remote: str) -> None:
    what = f"{counted(waiting, 'executable')} {'waits' if waiting == 1 else 'wait'} for {remote}"
    note(f"{what}; the next compile with this --remote and cache folder sends {'it' if waiting == 1 else 'them'}")


def _print_troubles(assembly: Assembly) -> None:
    """Says when the remote was no help, so that its failures do not look like ordinary misses."""
    failures = assembly.node.counters.snapshot()["failures"]
    remote = {name.partition(".")[2]: count for name, count in failures.items() if name.startswith("remote.")}
    if remote:
        what = ", ".join(f"{count} x {kind}" for kind, count in remote.items())
        note(f"the remote was degraded ({what}); `torchtpu-cache doctor` says more")


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int, str, float], None]]:
    """A line on the terminal that says which file is at work, and for how long; nothing where there is no terminal."""
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        yield lambda _index, _name, _seconds: None
        return
    from rich.text import Text

    with screen.status("") as line:

        def show(index: int, name: str, seconds: float) -> None:
            minutes, rest = divmod(round(seconds), 60)
            compiling = f"  compiling {minutes}:{rest:02d}" if seconds else ""
            line.update(Text(f"[{index + 1}/{total}] {name}{compiling}"))

        yield show
