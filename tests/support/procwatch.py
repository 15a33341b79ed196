"""What processes hold, as the kernel tells it: memory, descriptors, threads, children."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Of one process at one moment; `children_rss_bytes` is of all below it together."""

    rss_bytes: int
    descriptors: int
    threads: int
    children: int
    children_rss_bytes: int


def held_by(pid: int) -> Held | None:
    """What the process holds now; None where it is gone."""
    try:
        rss_bytes, threads = _status(pid)
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
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
