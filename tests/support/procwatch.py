"""What processes hold, as the kernel tells it: memory, descriptors, threads, children."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Of one process at one moment.

    Args:
        descriptors: without those that are kept on purpose.
        children: of all below it, as `children_rss_bytes` is of all together.
    """

    rss_bytes: int
    descriptors: int
    threads: int
    children: int
    children_rss_bytes: int


def held_by(pid: int, kept: re.Pattern[str] | None = None) -> Held | None:
    """What the process holds now; None where it is gone.

    Args:
        kept: matches the paths of files that it may keep open, each once and as long as it is there.
    """
    try:
        rss_bytes, threads = _status(pid)
        descriptors = _descriptors(pid, kept)
        below = list(_below(pid))
    except (OSError, KeyError):
        return None
    sizes = []
    for child in below:
        try:
            sizes.append(_status(child)[0])
        except (OSError, KeyError):
            continue  # it ended meanwhile
    return Held(
        rss_bytes=rss_bytes,
        descriptors=descriptors,
        threads=threads,
        children=len(sizes),
        children_rss_bytes=sum(sizes),
    )


def resident_bytes(pid: int) -> tuple[int, int]:
    """Now, and at most so far."""
    fields = _fields(pid)
    return _bytes(fields["VmRSS"]), _bytes(fields["VmHWM"])


def _status(pid: int) -> tuple[int, int]:
    """Resident bytes and threads; KeyError of a zombie, which has none."""
    fields = _fields(pid)
    return _bytes(fields["VmRSS"]), int(fields["Threads"])


def _fields(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _bytes(field: str) -> int:
    return int(field.split()[0]) * 1024


def _descriptors(pid: int, kept: re.Pattern[str] | None) -> int:
    paths = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            paths.append(os.readlink(descriptor))
        except FileNotFoundError:
            continue  # it was closed meanwhile
    return len(paths) - (0 if kept is None else len({path for path in paths if kept.fullmatch(path)}))


def _below(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue  # the thread ended meanwhile
        for child in children:
            yield int(child)
            yield from _below_or_none(int(child))


def _below_or_none(pid: int) -> list[int]:
    try:
        return list(_below(pid))
    except OSError:
        return []
