"""Files that a flag or an option names: their content is part of what is compiled.

Content alone would not tell that a file was changed while a compiler read it, and changed back. So what is read can be
noted with what `stat` says of it, and held against what it says after the compile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Final

from torchtpu_cache_core.canonical.rules import FILE_FLAGS
from torchtpu_cache_core.errors import Bypass
from torchtpu_cache_core.identity import Signature, signature_of
from torchtpu_cache_core.regular import open_regular

MAX_FLAG_FILE_BYTES: Final = 256 << 20
_MAX_FOLDER_FILES: Final = 1024

PLAIN: Final = re.compile(r"true|false|[+-]?[0-9]{1,32}(\.[0-9]{0,32})?([eE][+-]?[0-9]{1,4})?")
"""Booleans and numbers: what only a flag that is known to name a file takes for a file's name."""

_LOOKS_READ: Final = re.compile(r"(^|(?<= ))(content|folder):sha256:[0-9a-f]{64}( literal)*\Z")

_NO_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})
"""Of `stat`: there is no file of that name. Any other failure says nothing of that, such as a mount that hangs."""

_OF_A_PROCESS: Final = ("/proc/", "/dev/fd/", "/dev/std")

Noted = dict[str, Signature]
"""Files and folders that were read, by the path that names each, with what `stat` said of them then."""


def file_value(flag: str, value: str, *, noted: Noted) -> str:
    """The value of a flag, with the content of the file that it names, if it names one.

    A flag of `rules.FILE_FLAGS` is reduced to the content of its file or folder, so that another path to equal bytes
    gives an equal key. Any other value is kept, and the content of a file of that name is added. No value that names
    no file gets a text that one which does could get.

    Args:
        noted: gets what is read.

    Raises:
        Bypass: the file is there but cannot be read, is over a limit, or may be another one for each process.
    """
    known = flag in FILE_FLAGS
    if not value or "\0" in value or (PLAIN.fullmatch(value) and not known):
        return _literal(value)
    _refuse_what_differs(flag, value)
    try:
        mode = Path(value).stat().st_mode
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise _unreadable(flag, value) from None
        return _literal(value)
    if stat.S_ISFIFO(mode):
        # Such as a shell's `<(command)`: who reads it takes its content away.
        raise _unreadable(flag, value)
    if known and stat.S_ISCHR(mode) and value != os.devnull:
        raise _unreadable(flag, value)
    if stat.S_ISREG(mode):
        content = f"content:sha256:{_digest(flag, value, noted=noted)}"
        return content if known else f"{value} {content}"
    if stat.S_ISDIR(mode) and known:
        return f"folder:sha256:{_folder_digest(flag, value, noted=noted)}"
    # A folder under an unknown flag is a place to write far more often than an input, and its listing never rests.
    return _literal(value)


def _refuse_what_differs(flag: str, path: str) -> None:
    """Bypass for a name that leads each process to a file of its own, whether it leads this one to any."""
    # The name counts, and not where it leads: that may be a plain file.
    whole = Path(path)
    if not whole.is_absolute():
        with contextlib.suppress(OSError):  # the working directory is gone, and a name in it leads nowhere
            whole = Path.cwd() / path
    # Two slashes at the beginning, which normpath leaves, mean the same as one on Linux.
    if f"/{os.path.normpath(whole).lstrip('/')}".startswith(_OF_A_PROCESS):
        raise Bypass("flag_file_unreadable", f"{flag} names {path}, which is another file for each process")


def names_a_file(flag: str, value: str) -> bool:
    """Whether a flag's value is not all that is to be known of it, for a caller that makes no key of it.

    Raises:
        Bypass: as `file_value`.
    """
    return file_value(flag, value, noted={}) != value


def _literal(value: str) -> str:
    """A value that was not read from a file; one that looks as if it were is marked, once more each time."""
    return f"{value} literal" if _LOOKS_READ.search(value) else value


def read_flag_file(flag: str, path: str, *, noted: Noted) -> bytes:
    """The content of a file that a flag or variable names.

    Args:
        noted: gets what is read.

    Raises:
        Bypass: it cannot be read, is over 256 MiB, or may be another one for each process.
    """
    _refuse_what_differs(flag, path)
    try:
        with open_regular(path, follows_links=True) as file:
            noted[path] = signature_of(os.fstat(file.fileno()))
            content = file.read(MAX_FLAG_FILE_BYTES + 1)
    except (OSError, ValueError):
        raise _unreadable(flag, path) from None
    if len(content) > MAX_FLAG_FILE_BYTES:
        raise Bypass("flag_file_unreadable", f"{flag} names {path}, which is over {MAX_FLAG_FILE_BYTES:,} bytes")
    return content


def _digest(flag: str, path: str, *, noted: Noted) -> str:
    return hashlib.sha256(read_flag_file(flag, path, noted=noted)).hexdigest()


def _folder_digest(flag: str, path: str, *, noted: Noted) -> str:
    try:
        noted[path] = signature_of(Path(path).stat())
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_file())
    except OSError:
        raise _unreadable(flag, path) from None
    if len(names) > _MAX_FOLDER_FILES:
        raise Bypass("flag_file_unreadable", f"{flag} names {path}, which holds more than {_MAX_FOLDER_FILES:,} files")
    listing = hashlib.sha256()
    for name in names:
        raw = os.fsencode(name)
        listing.update(b"%d:%s%s" % (len(raw), raw, _digest(flag, f"{path}/{name}", noted=noted).encode()))
    return listing.hexdigest()


def _unreadable(flag: str, path: str) -> Bypass:
    return Bypass("flag_file_unreadable", f"{flag} names {path}, which cannot be read")
