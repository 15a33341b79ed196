"""Opens what should be a file and may be anything: a pipe that nobody writes to, a folder, a device without an end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path | str, *, follows_links: bool) -> BinaryIO:
    """The regular file at `path`, open for reading. Waits for nothing and leaves no descriptor behind.

    Args:
        follows_links: whether the name itself may be a symbolic link.

    Raises:
        OSError: there is none, it cannot be opened, or it is no regular file (EINVAL).
        ValueError: the path holds a NUL.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for its writer.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    fd = os.open(path, flags if follows_links else flags | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise
