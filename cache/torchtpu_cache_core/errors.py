"""The errors of torchtpu-cache. Whatever else a module raises on purpose refines one of them.

    CacheError
    ├── InvalidName (ValueError)      a namespace, key or digest that breaks its grammar
    ├── InvalidRequest (ValueError)   a program, options, target or environment that cannot be read
    ├── ConfigError (ValueError)      a setting that is unknown or has no sense
    ├── Bypass                        the request must not be cached; the compile goes on
    ├── StoreError                    a store failed; a plain miss is a value, never an error
    │   ├── StoreUnavailable          a retry later may help
    │   │   └── BreakerOpen           the store was not even asked
    │   ├── StoreRefused              the store said no; a retry will not help
    │   ├── StoreFull                 no room
    │   ├── EntryTooLarge             over a limit, which the error names
    │   └── CorruptEntry              bytes that must not reach a loader
    ├── CompileError                  XLA did not give an executable
    │   ├── CompilerMissing           the compiler is not installed here
    │   └── CompilerCrashed           the compiler's process died or hung
    └── LoadError                     an executable did not become live

Messages are one sentence for a person. `kind` is for counters: bounded, and free of keys, paths and tokens.
"""

from __future__ import annotations

import enum


class FailureKind(enum.StrEnum):
    """Why a store did not answer; the label of every failure counter. A true miss is none of these."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    RESET = "reset"
    THROTTLED = "throttled"
    SERVER_ERROR = "server_error"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    READ_ONLY = "read_only"
    PROTOCOL = "protocol"
    TOO_LARGE = "too_large"
    FULL = "full"
    IO = "io"
    CORRUPT = "corrupt"


class CorruptReason(enum.StrEnum):
    """What is wrong with an entry, in the order in which a reader checks."""

    SHORT = "short"
    MAGIC = "magic"
    VERSION = "version"
    LENGTH = "length"
    DIGEST = "digest"
    HEADER = "header"
    KEY = "key"
    TARGET = "target"
    CODEC = "codec"
    PAYLOAD = "payload"
    MANIFEST = "manifest"
    SIGNATURE = "signature"


class CacheError(Exception):
    """Base of every error that this project raises on purpose."""


class InvalidName(CacheError, ValueError):
    """A namespace, key or digest that breaks its grammar."""


class InvalidRequest(CacheError, ValueError):
    """A program, options, target or environment that cannot be read."""


class ConfigError(CacheError, ValueError):
    """A setting that is unknown or has no sense."""


class Bypass(CacheError):
    """The request must not be cached: compile it, and publish nothing.

    Args:
        reason: one of the short, bounded reasons of docs/key.md; it ends in counters.
        detail: what a person wants to know beside it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class StoreError(CacheError):
    """A store failed to do what it was asked; the caller compiles and counts `kind`."""

    kind: FailureKind

    def __init__(self, message: str, kind: FailureKind = FailureKind.IO) -> None:
        super().__init__(message)
        self.kind = kind


class StoreUnavailable(StoreError):
    """A retry later may help: refused connection, timeout, reset, 429, 5xx, EIO.

    Args:
        retry_after_seconds: what the store asked for, if it did.
    """

    def __init__(
        self, message: str, kind: FailureKind = FailureKind.IO, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, kind)
        self.retry_after_seconds = retry_after_seconds


class BreakerOpen(StoreUnavailable):
    """The store was not asked. `kind` is that of the failure that opened the breaker."""


class StoreRefused(StoreError):
    """The store said no, and will say it again: permissions, authentication, a protocol we do not speak."""


class StoreFull(StoreError):
    """No room: ENOSPC, EDQUOT, 507, or a limit of ours that eviction could not make room under."""

    def __init__(self, message: str) -> None:
        super().__init__(message, FailureKind.FULL)


class EntryTooLarge(StoreError):
    """The entry is over a size limit that no eviction can help with."""

    def __init__(self, size_bytes: int, limit_bytes: int | None) -> None:
        limit = "a limit that the store did not name" if limit_bytes is None else f"the limit of {limit_bytes:,} bytes"
        super().__init__(f"the entry of {size_bytes:,} bytes is over {limit}", FailureKind.TOO_LARGE)
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class CorruptEntry(StoreError):
    """Bytes that must not reach a loader. The store that held them has set them aside where it could."""

    def __init__(self, reason: CorruptReason, detail: str = "") -> None:
        super().__init__(f"corrupt entry ({reason}){': ' + detail if detail else ''}", FailureKind.CORRUPT)
        self.reason = reason
        self.detail = detail


class CompileError(CacheError):
    """XLA did not give an executable; the message is the compiler's own, shortened."""


class CompilerMissing(CompileError):
    """The compiler is not installed here; the message says what to install."""


class CompilerCrashed(CompileError):
    """The compiler's process died or overran its deadline; only this program is lost."""


class LoadError(CacheError):
    """An executable did not become live.

    Args:
        blames_entry: the bytes are at fault, so that the entry is set aside; a busy device, too little memory or a
            cancellation says nothing of them.
    """

    def __init__(self, message: str, *, blames_entry: bool = True) -> None:
        super().__init__(message)
        self.blames_entry = blames_entry
