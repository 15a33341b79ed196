"""Flag strings, split as their readers split them, and reduced to what they amount to.

XLA_FLAGS follows XLA's own reader (xla/parse_flags_from_env.cc): a flag is `-` and what follows up to white space; a
value may stand in single quotes, or in double quotes with backslash escapes; reading ends at the first word without a
`-`. LIBTPU_INIT_ARGS, which libtpu splits at blanks alone (a tab or a line's end is a part of a value), and the command
line are read by absl, whose flags may also take the next word as their value; what quoting libtpu undoes is not known.
So there the order is given up only where every flag has its `=`, and nothing is unquoted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core.canonical.debug_options import DEBUG_OPTIONS
from torchtpu_cache_core.canonical.files import PLAIN, Noted, file_value, read_flag_file
from torchtpu_cache_core.canonical.rules import DROPPED_FLAGS, ORDERED_FLAGS
from torchtpu_cache_core.errors import Bypass

_WHITE: Final = " \t\r\n"
_ASCII_WHITE: Final = " \t\r\n\f\v"
_NAME: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_MAX_FLAGS: Final = 4096
_MAX_NESTED_FILES: Final = 4
_BOOLEANS: Final = frozenset(name for name, kind in DEBUG_OPTIONS.values() if kind == "bool")
_WORD: Final = "="
"""Stands for the name of a word that is no flag: no flag's name holds an equals sign."""
_END: Final = "--"
"""Ends the flags of a command line, for readers that heed it."""
_FLAG_PREFIXES: Final = ("xla", "libtpu", "tpu", "noxla", "nolibtpu", "notpu")
_FLAG_FILE: Final = "flagfile"
_FROM_VARIABLES: Final = ("fromenv", "tryfromenv")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as it was given: name without its leading dashes, and its value; None where it has no `=`."""

    name: str
    value: str | None


@dataclass(frozen=True, slots=True)
class Flags:
    """All flags of one road, in the order given.

    Args:
        flags: what was read.
        rest: what the reader would not take for a flag, as it stands.
        ordered: the order of different flags may have a meaning.
    """

    flags: tuple[Flag, ...]
    rest: str = ""
    ordered: bool = False

    def canonical(self, *, noted: Noted) -> dict[str, str]:
        """What the flags amount to, by sorted name; dropped flags are left out.

        A flag that stands twice counts once, with its last value, if all its values are booleans or numbers; else the
        list of all its values, in order, is the value.

        Args:
            noted: gets the files that values name.

        Raises:
            Bypass: a value names a file that cannot be read.
        """
        if self.ordered:
            return {"*ordered*": _words(self.flags, noted=noted), **self._rest()}
        if any(flag.name in ORDERED_FLAGS for flag in self.flags):
            kept = (flag for flag in self.flags if flag.name not in DROPPED_FLAGS)
            return {"*ordered*": _words(kept, noted=noted), **self._rest()}
        names = {flag.name for flag in self.flags}
        groups: dict[str, list[Flag]] = {}
        for flag in self.flags:
            # `--nof` is another way to set `f`: their order has a meaning.
            negates = flag.name.startswith("no") and flag.name[2:] in names
            name = flag.name[2:] if negates else flag.name
            if name not in DROPPED_FLAGS:
                groups.setdefault(name, []).append(flag)
        return {_component(name): _effective(groups[name], noted=noted) for name in sorted(groups)} | self._rest()

    def effective(self, name: str) -> str | None:
        """The last value of a flag, `true` where it has none; None where it is not given."""
        given = [flag.value for flag in self.flags if flag.name == name]
        return None if not given else "true" if given[-1] is None else given[-1]

    def _rest(self) -> dict[str, str]:
        return {"*rest*": self.rest} if self.rest else {}


def _value(flag: Flag, *, noted: Noted) -> str:
    if flag.value is None:
        return "true"
    if flag.name in _BOOLEANS and flag.value in ("0", "1"):
        return "true" if flag.value == "1" else "false"
    return file_value(flag.name, flag.value, noted=noted)


def _component(name: str) -> str:
    """What a flag's component is called; `*ordered*` and its kin are never a flag's."""
    return f"*{name}" if name.startswith("*") else name


def _words(flags: Iterable[Flag], *, noted: Noted) -> str:
    return "[" + " ".join(_word(flag, noted=noted) for flag in flags) + "]"


def _word(flag: Flag, *, noted: Noted) -> str:
    value = None if flag.value is None else file_value(flag.name, flag.value, noted=noted)
    if flag.name == _WORD:
        return _framed(value or "", "=")  # what a flag is written as may be any text, so the frame tells them apart
    return _framed(flag.name if value is None else f"{flag.name}={value}")


def _framed(text: str, mark: str = ":") -> str:
    return f"{len(text)}{mark}{text}"


def _effective(group: list[Flag], *, noted: Noted) -> str:
    if len({flag.name for flag in group}) > 1:
        return "no" + _words(group, noted=noted)
    values = [_value(flag, noted=noted) for flag in group]
    if all(PLAIN.fullmatch(value) for value in values) or (len(values) == 1 and not values[0].startswith(("[", "no["))):
        return values[-1]
    return "[" + " ".join(map(_framed, values)) + "]"


def parse_xla_flags(text: str) -> Flags:
    """The flags in XLA_FLAGS, or in the file that it names, as XLA reads them."""
    flags: list[Flag] = []
    at = _skip(text, 0)
    while at < len(text) and text[at] == "-":
        end = at
        while end < len(text) and text[end] in _NAME:
            end += 1
        name = text[at:end]
        if text[end : end + 1] == "=" and text[end + 1 : end + 2] in ("'", '"'):
            value, end = _quoted(text, end + 1)
            flags.append(Flag(_undashed(name), value))
        else:
            start = at
            while end < len(text) and text[end] not in _WHITE:
                end += 1
            flags.append(_flag(text[start:end]))
        at = _skip(text, end)
        if len(flags) > _MAX_FLAGS:
            return Flags((), rest=text)
    return Flags(tuple(flags), rest=text[at:])


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITE:
        at += 1
    return at


def _quoted(text: str, at: int) -> tuple[str, int]:
    quote, at = text[at], at + 1
    value: list[str] = []
    while at < len(text) and text[at] != quote:
        if quote == '"' and text[at] == "\\" and at + 1 < len(text):
            at += 1
        value.append(text[at])
        at += 1
    return "".join(value), min(at + 1, len(text))


def parse_init_args(text: str, *, noted: Noted) -> Flags:
    """The flags in LIBTPU_INIT_ARGS, with the content of each `--flagfile` in its place.

    Args:
        noted: gets the flag files.

    Raises:
        Bypass: a flag file cannot be read, or flags come out of further environment variables (`--fromenv`).
    """
    flags, ordered = _absl([word for word in text.split(" ") if word], lambda word: True, 0, noted=noted)
    if len(flags) > _MAX_FLAGS or any(c in text for c in "'\"\\"):
        # Whether and how quotes are undone there is not known; the text as it stands tells all cases apart.
        return Flags(tuple(flags), rest=text, ordered=True)
    return Flags(tuple(flags), ordered=ordered)


def parse_argv(argv: Sequence[str], *, noted: Noted) -> Flags:
    """The flags of a command line that a compiler could read as its own, with the bare word that follows one.

    Args:
        noted: gets the flag files.

    Raises:
        Bypass: as `parse_init_args`, for flags of a compiler.
    """
    words: list[str] = []
    after_bare_flag = ended = False
    for word in argv:
        ours = _is_ours(word)
        if ours and ended and _END not in words:
            words.append(_END)  # a reader that heeds it takes no flag behind it, and its order with them counts
        if ours or (after_bare_flag and not word.startswith("-")):
            words.append(word)
        after_bare_flag = ours and "=" not in word
        ended |= word == _END
    flags, ordered = _absl(words, _is_ours, 0, noted=noted)
    return Flags(tuple(flags), ordered=ordered)


def _is_ours(word: str) -> bool:
    if not word.startswith("-"):
        return False
    flag = _flag(word)
    if flag.name in _FROM_VARIABLES:
        return any(name.startswith(_FLAG_PREFIXES) for name in (flag.value or "").split(","))
    return flag.name == _FLAG_FILE or flag.name.startswith(_FLAG_PREFIXES)


def _absl(words: list[str], is_ours: Callable[[str], bool], depth: int, *, noted: Noted) -> tuple[list[Flag], bool]:
    """All flags in order, and whether their order may have a meaning."""
    flags: list[Flag] = []
    ordered = False
    for index, word in enumerate(words):
        flag = _flag(word)
        if flag.name in _FROM_VARIABLES:
            raise Bypass("flags_unreadable", f"--{flag.name} takes flags from variables that are not looked at")
        if flag.name == _FLAG_FILE:
            if flag.value is None:
                raise Bypass("flags_unreadable", "--flagfile needs its file after an equals sign")
            nested, nested_ordered = _flag_files(flag.value, is_ours, depth, noted=noted)
            flags += nested
            ordered |= nested_ordered
            continue
        flags.append(flag)
        # A flag without a value may take the next word, whatever that is.
        ordered |= not word.startswith("-") or (flag.value is None and index + 1 < len(words))
    return flags, ordered


def _flag_files(names: str, is_ours: Callable[[str], bool], depth: int, *, noted: Noted) -> tuple[list[Flag], bool]:
    if depth >= _MAX_NESTED_FILES:
        raise Bypass("flags_unreadable", "flag files name each other more than four levels deep")
    flags: list[Flag] = []
    ordered = False
    for name in names.split(","):
        text = read_flag_file(_FLAG_FILE, name, noted=noted).decode("utf-8", errors="surrogateescape")
        # As absl splits and strips: what else Python takes for a line's end or for white space is a part of a value.
        lines = [line.strip(_ASCII_WHITE) for line in text.split("\n")]
        words = [line for line in lines if line and not line.startswith("#") and is_ours(line)]
        nested, nested_ordered = _absl(words, is_ours, depth + 1, noted=noted)
        flags += nested
        ordered |= nested_ordered
    return flags, ordered


def _flag(word: str) -> Flag:
    if not word.startswith("-"):
        return Flag(_WORD, word)
    name, equals, value = word.partition("=")
    return Flag(_undashed(name), value if equals else None)


def _undashed(name: str) -> str:
    # absl takes one dash or two; XLA's reader refuses one, so nothing is compiled there.
    for dashes in ("--", "-"):
        if name.startswith(dashes) and not name.startswith("---"):
            return name[len(dashes) :]
    return name
