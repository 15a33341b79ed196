"""Where operating-system errors become store errors: the one table, so that none escapes under another name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from torchtpu_cache_core.errors import FailureKind, StoreError, StoreFull, StoreRefused, StoreUnavailable

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM})
_NEVER: Final = frozenset(
    {errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOSYS, errno.EOPNOTSUPP}
)
_TIMEOUT: Final = frozenset({errno.ETIMEDOUT})
_TRANSIENT: Final = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EAGAIN, errno.EEXIST})
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})

ATTEMPTS: Final = 4
"""How often a call is made at most whose failure `is_transient`."""


def has_no_locks(error: OSError) -> bool:
    """Whether flock failed because this file system has no locks, rather than because somebody holds one."""
    return error.errno in _NO_LOCKS


def is_full(error: OSError) -> bool:
    """Whether removing something may help."""
    return error.errno in _FULL


def is_transient(error: OSError) -> bool:
    """Whether the same call may succeed at once: what network file systems say of names that just changed."""
    return error.errno in _TRANSIENT


def store_error(error: OSError, doing: str) -> StoreError:
    """The store error that an `OSError` means; a number that is not in the table may go away, so it is unavailable.

    Args:
        doing: what failed, for a person, without a path (`the entry could not be written`).
    """
    why = os.strerror(error.errno) if error.errno else str(error)
    message = f"{doing}: {why}"
    if error.errno in _FULL:
        return StoreFull(message)
    if error.errno == errno.EROFS:
        return StoreRefused(message, FailureKind.READ_ONLY)
    if error.errno in _FORBIDDEN:
        return StoreRefused(message, FailureKind.FORBIDDEN)
    if error.errno in _NEVER:
        return StoreRefused(message, FailureKind.IO)
    kind = FailureKind.TIMEOUT if error.errno in _TIMEOUT else FailureKind.IO
    return StoreUnavailable(message, kind)


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raises what `store_error` makes of any `OSError` from the block."""
    try:
        yield
    except OSError as error:
        raise store_error(error, doing) from error
