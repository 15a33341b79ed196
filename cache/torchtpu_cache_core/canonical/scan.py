"""A look at a program that nobody here can parse: may it be hashed as it stands?

It may where its bytes can be read so far that a custom call or a host transfer would be seen, and none is. MLIR
bytecode (https://mlir.llvm.org/docs/BytecodeFormat/) keeps every name of an operation and every symbol in its string
section; text is searched as a whole. Everything is bounded by the length of the program, and nothing recurses.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.request import ProgramIdentity

SCAN_VERSION: Final = "1"
FORM_RAW: Final = "raw"

BYTECODE_MAGIC: Final = b"ML\xefR"
_MAX_BYTECODE_VERSION: Final = 6
_MAX_SECTION: Final = 8
_STRING_SECTION: Final = 0

# VHLO spells operations with a version: custom_call_v1, send_v1.
_SUSPECT: Final = re.compile(
    rb"custom_call|callback|py_func|host_transfer|(?<![A-Za-z0-9_])(send|recv)(_v[0-9]+)?(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_ESCAPE: Final = re.compile(rb"\\([0-9A-Fa-f]{2})")
# Possessive throughout: a hostile head of comments must not make it try every way to split them.
_TEXT_START: Final = re.compile(rb"\s*+(?:(?://|#)[^\n]*+\s*+)*+(\"builtin\.module\"|module\b|func\.func\b)")


def scan(program: bytes) -> ProgramIdentity:
    """The identity of a program by its raw bytes, debug information and all: a safe miss for one that moved.

    Raises:
        Bypass: `unparsed_custom_call` where there is any trace of a custom call, send, receive or callback;
            `unscannable` where the bytes are neither MLIR bytecode of a known version nor MLIR text.
    """
    if program.startswith(BYTECODE_MAGIC):
        try:
            text = _strings(program)
        except (IndexError, ValueError):
            raise Bypass("unscannable", "the program is no MLIR bytecode of a known version") from None
    elif _is_text(program):
        # A quoted operation name may be spelt in escapes.
        text = program + b"\0" + _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), program)
    else:
        raise Bypass("unscannable", "the program is neither MLIR bytecode nor MLIR text")
    if found := _SUSPECT.search(text):
        raise Bypass("unparsed_custom_call", f"the program cannot be parsed here and holds {found[0].decode()!a}")
    return ProgramIdentity(FORM_RAW, hashlib.sha256(program).hexdigest(), len(program))


def text_count(program: bytes, attribute: str) -> int | None:
    """The integer that MLIR text gives for a module attribute such as `mhlo.num_replicas`; None where it gives none."""
    if program.startswith(BYTECODE_MAGIC):
        return None
    found = re.search(rb"\b" + re.escape(attribute.encode()) + rb" = ([0-9]{1,9}) : i32\b", program)
    return int(found[1]) if found else None


def _is_text(program: bytes) -> bool:
    if b"\0" in program or not _TEXT_START.match(program):
        return False
    try:
        program.decode()
    except UnicodeDecodeError:
        return False
    return True


def _strings(program: bytes) -> bytes:
    """All strings of MLIR bytecode, NUL between them. IndexError or ValueError where the bytes are not that."""
    version, at = _varint(program, len(BYTECODE_MAGIC))
    if version > _MAX_BYTECODE_VERSION:
        raise ValueError
    at = program.index(b"\0", at) + 1  # the producer
    strings: bytes | None = None
    while at < len(program):
        head = program[at]
        size, at = _varint(program, at + 1)
        if head & 0x80:  # aligned: the alignment follows, then padding up to it
            alignment, at = _varint(program, at)
            if not 0 < alignment <= 1 << 16:
                raise ValueError
            at += -at % alignment
        if head & 0x7F > _MAX_SECTION or size > len(program) - at:
            raise ValueError
        if head & 0x7F == _STRING_SECTION:
            if strings is not None:
                raise ValueError
            strings = _string_section(program[at : at + size])
        at += size
    if strings is None:
        raise ValueError
    return strings


def _string_section(section: bytes) -> bytes:
    count, at = _varint(section, 0)
    if count > len(section):
        raise ValueError
    total = 0
    for _ in range(count):
        size, at = _varint(section, at)
        total += size
    # Each length includes a closing NUL, and lengths and bytes fill the section: nothing hides between strings.
    if total != len(section) - at:
        raise ValueError
    return section[at:]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """MLIR's prefix varint: the trailing zero bits of the first byte say how many bytes follow."""
    first = data[at]
    following = 8 if first == 0 else (first & -first).bit_length() - 1
    end = at + 1 + following
    if end > len(data):
        raise IndexError
    value = int.from_bytes(data[at:end], "little")
    return (value >> 8 if first == 0 else value >> (following + 1)), end
