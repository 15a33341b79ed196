"""Names that reach a path, a storage key or a URL: validated types, built only through their validator."""

from __future__ import annotations

import re
from typing import Final, Self

from torchtpu_cache_core.errors import InvalidName

_NAMESPACE: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_KEY: Final = re.compile(r"[a-z][a-z0-9]{0,15}-[0-9a-f]{64}")
_KEY_PREFIX: Final = re.compile(r"[a-z][a-z0-9]{0,15}-[0-9a-f]{0,64}|[0-9a-f]{4,64}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class _Name(str):
    """A string that matched its grammar when it was built, so that no later code has to check it."""

    __slots__ = ()
    _grammar: re.Pattern[str]
    _what: str

    def __new__(cls, value: str) -> Self:
        if not cls._grammar.fullmatch(value):
            raise InvalidName(f"{value[:80]!r} is not {cls._what}")
        return super().__new__(cls, value)

    @classmethod
    def pattern(cls) -> str:
        """The grammar as a regular expression of JSON Schema."""
        return f"^(?:{cls._grammar.pattern})$"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class Namespace(_Name):
    """A tenant: `[a-z0-9][a-z0-9-]{0,62}`."""

    __slots__ = ()
    _grammar = _NAMESPACE
    _what = "a namespace (1 to 63 of a-z, 0-9 and -, not starting with -)"


class Key(_Name):
    """`<scheme>-<64 hex>`: what a request hashes to."""

    __slots__ = ()
    _grammar = _KEY
    _what = "a key (<scheme>-<64 hex digits>)"

    @property
    def scheme(self) -> str:
        return self.split("-", 1)[0]

    @property
    def hexdigest(self) -> str:
        return self.split("-", 1)[1]

    @property
    def short(self) -> str:
        """What a person reads: the scheme and twelve hex digits, unique in practice."""
        return self[: len(self.scheme) + 13]


class KeyPrefix(_Name):
    """What a person types for a key: any leading part of it, with or without the scheme."""

    __slots__ = ()
    _grammar = _KEY_PREFIX
    _what = "a key or the beginning of one"

    def matches(self, key: Key) -> bool:
        return key.startswith(self) or key.hexdigest.startswith(self)


class Digest(_Name):
    """A SHA-256 as 64 lower-case hex digits. An entry's digest covers the whole entry, trailer included."""

    __slots__ = ()
    _grammar = _DIGEST
    _what = "a SHA-256 digest (64 lower-case hex digits)"

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        return cls(raw.hex())


DEFAULT_NAMESPACE: Final = Namespace("default")
