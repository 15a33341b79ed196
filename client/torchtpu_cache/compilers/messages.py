"""Turns what compilers print into one sentence for a person."""

from __future__ import annotations

import re
from typing import Final

_MAX_CHARS: Final = 400
_MAX_LINES: Final = 2

_LOCATION: Final = re.compile(r"^(?:[A-Z_]+: )?(?:\S*:\d+:\d+|<unknown>:\d+): (?:error|note): ")
# XLA's last line of any module that it cannot parse, with guesses at causes that are seldom right.
_UNPARSED: Final = re.compile(r"^Failed to parse using StableHLO(?: (v[\d.]+))?")
_GLOG: Final = re.compile(r"^[IWEF]\d{4,8} [\d:.]+\s+\d+ \S+:\d+\] ")
_STACK: Final = re.compile(
    r"^\s*(?:@\s|\*\*\*|#\d+\s|PC:|===|Fatal Python error|(?:Current )?[Tt]hread 0x|File \"|Extension modules)"
)
# How libraries begin the line that says why they end the process.
_FATAL: Final = re.compile(r"^(?:F\d{4,8} |ERROR: |terminate called|.*Check failed|.*LLVM ERROR)")


# Statuses of XLA that say nothing of the executable.
_NOT_ITS_FAULT: Final = (
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "CANCELLED",
    "ABORTED",
    "DEADLINE_EXCEEDED",
    "UNIMPLEMENTED",
)


def shorten(message: str) -> str:
    """The first lines of a compiler's message as one printable sentence, without source positions."""
    lines = [_LOCATION.sub("", line.strip()) for line in message.splitlines() if line.strip()]
    unparsed = next(filter(None, map(_UNPARSED.match, lines)), None)
    lines = [line for line in lines if not _UNPARSED.match(line)]
    text = "; ".join(lines[:_MAX_LINES]).rstrip(".")
    if unparsed is not None:
        newest = f" (up to {unparsed[1]})" if unparsed[1] else ""
        text = f"it is no StableHLO module that this XLA can read{newest}" + (f": {text}" if text else "")
    text = "".join(char if char.isprintable() else " " for char in text)
    if len(text) > _MAX_CHARS:
        text = text[: _MAX_CHARS - 1] + "…"
    return text or "the compiler gave no reason"


def last_words(stderr_tail: str) -> str:
    """Why a process most likely died: the last fatal line of its standard error, else the last one that is no stack."""
    lines = [line for line in stderr_tail.splitlines() if line.strip() and not _STACK.match(line)]
    fatal = [line for line in lines if _FATAL.match(line)]
    if fatal:
        return shorten(_GLOG.sub("", fatal[-1]))
    hint = "it gave no reason (killed from outside, or out of memory?)"
    return f"{hint}; the last that it printed is: {shorten(_GLOG.sub('', lines[-1]))}" if lines else hint


def blames_executable(error: BaseException) -> bool:
    """Whether what XLA said while it loaded an executable is the executable's fault."""
    return not isinstance(error, MemoryError) and not str(error).startswith(_NOT_ITS_FAULT)
