"""What can become of an entry's bytes: accidents, which no digest survives, and forgeries, whose digests are made anew.

An **accident** is a function of bytes, and fits everything that has a digest: entries, blocks, manifests, aliases,
what goes over the wire. A **forgery** is an entry with a right trailer, made of two honest ones: what somebody plants
who can write here. Each says what must refuse it, at the latest (`By`).
"""

from __future__ import annotations

import enum
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from support.bombs import bombs
from support.victims import Victim
from torchtpu_cache_core.entry import MAX_HEADER_BYTES
from torchtpu_cache_core.jsontext import canonical_json
from torchtpu_cache_core.testing.entries import header_fields, payload_of, sealed

Accident = Callable[[random.Random, bytes], bytes]


class By(enum.Enum):
    """What refuses a forgery."""

    HEAD = "its prefix and header: version, lengths, codec, key, components"
    PAYLOAD = "its payload, once the executable is asked for"
    DIGEST = (
        "nothing in it, for it is a consistent entry of the right key: only a manifest, a machine's mark or an ETag "
        "that names the honest digest. Where nothing names it, it is out of reach until there are signatures"
    )


@dataclass(frozen=True, slots=True)
class Forgery:
    """An entry with a right trailer.

    Args:
        kind: what was done.
        data: the entry's bytes.
        by: what must refuse it. One of DIGEST may be refused earlier, or hold the true executable all the same.
    """

    kind: str
    data: bytes = field(repr=False)
    by: By = By.HEAD


# ---- accidents -------------------------------------------------------------------------------------------------------


def flip_one(rng: random.Random, data: bytes) -> bytes:
    return flip(rng, data, 1)


def flip_some(rng: random.Random, data: bytes) -> bytes:
    return flip(rng, data, rng.randint(2, 64))


def flip(rng: random.Random, data: bytes, count: int) -> bytes:
    """So many different bits inverted."""
    changed = bytearray(data)
    for bit in rng.sample(range(8 * len(data)), min(count, 8 * len(data))):
        changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def flip_head(rng: random.Random, data: bytes) -> bytes:
    """One bit of the first 24 bytes: magic, version, lengths."""
    return flip(rng, data[:24], 1) + data[24:]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_front(rng: random.Random, data: bytes) -> bytes:
    return data[rng.randint(1, len(data)) :]


def cut_a_little(rng: random.Random, data: bytes) -> bytes:
    return data[: -rng.randint(1, min(64, len(data)))]


def lose_within(rng: random.Random, data: bytes) -> bytes:
    start, size = _range(rng, data)
    return data[:start] + data[start + size :]


def grow(rng: random.Random, data: bytes) -> bytes:
    return data + rng.randbytes(rng.randint(1, 300))


def grow_by_zeros(rng: random.Random, data: bytes) -> bytes:
    return data + bytes(rng.choice((1, 32, 512, 4096)))


def grow_within(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 64)) + data[at:]


def twice(rng: random.Random, data: bytes) -> bytes:
    return data + data


def repeat_within(rng: random.Random, data: bytes) -> bytes:
    start, size = _range(rng, data)
    return data[: start + size] + data[start : start + size] + data[start + size :]


def lose_a_page(rng: random.Random, data: bytes) -> bytes:
    """A block of the disk that reads as zeros."""
    size = rng.choice((512, 4096))
    start = rng.randrange(0, len(data), size)
    return data[:start] + bytes(len(data[start : start + size])) + data[start + size :]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    start, size = _range(rng, data)
    return data[:start] + rng.randbytes(size) + data[start + size :]


def ones(rng: random.Random, data: bytes) -> bytes:
    start, size = _range(rng, data)
    return data[:start] + b"\xff" * size + data[start + size :]


def shuffle_pages(rng: random.Random, data: bytes) -> bytes:
    pages = [data[at : at + 512] for at in range(0, len(data), 512)]
    rng.shuffle(pages)
    return b"".join(pages)


def text_mode(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n")


def garbage(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(len(data))


def huge_length(rng: random.Random, data: bytes) -> bytes:
    """Header or payload says that it has gigabytes."""
    if rng.random() < 0.3:
        return data[:12] + struct.pack("<I", rng.choice((MAX_HEADER_BYTES + 1, 1 << 30, (1 << 32) - 1))) + data[16:]
    size = rng.choice((1 << 30, (2 << 30) - 1, 2 << 30, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1))
    return data[:16] + struct.pack("<Q", size) + data[24:]


def other_length(rng: random.Random, data: bytes) -> bytes:
    """Header or payload is said to be a little longer or shorter than it is."""
    offset, form = rng.choice(((12, "<I"), (16, "<Q")))
    (length,) = struct.unpack_from(form, data, offset)
    raw = struct.pack(form, max(0, length + rng.choice((-256, -33, -32, -8, -1, 1, 8, 32, 33, 256))))
    return data[:offset] + raw + data[offset + len(raw) :]


def other_version(rng: random.Random, data: bytes) -> bytes:
    return data[:8] + struct.pack("<HH", rng.choice((0, 2, 3, 255, 256, 65535)), rng.choice((0, 1))) + data[12:]


def _range(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, rng.randint(1, min(4096, len(data) - start))


ANYWHERE: dict[str, Accident] = {
    accident.__name__: accident
    for accident in (
        *(flip_one, flip_some, cut, cut_front, cut_a_little, lose_within, grow, grow_by_zeros, grow_within, twice),
        *(repeat_within, lose_a_page, overwrite, ones, shuffle_pages, garbage),
    )
}
"""For any bytes."""

OF_ENTRIES: dict[str, Accident] = ANYWHERE | {
    accident.__name__: accident for accident in (flip_head, text_mode, huge_length, other_length, other_version)
}
"""For bytes that begin as an entry does."""


def accident(rng: random.Random, kinds: dict[str, Accident], data: bytes) -> tuple[str, bytes]:
    """A kind and what it makes of `data`, which is something else."""
    while True:
        kind = rng.choice(list(kinds))
        changed = kinds[kind](rng, data)
        if changed != data:
            return kind, changed


# ---- forgeries -------------------------------------------------------------------------------------------------------


def forgeries(rng: random.Random, victim: Victim, other: Victim) -> Iterator[Forgery]:
    """One of each kind, in place of the entry of `victim`."""
    yield from _of_another(rng, victim, other)
    yield from _bent(rng, victim)
    yield from _consistent(rng, victim, other)


def bombed(victim: Victim) -> Iterator[Forgery]:
    """The victim's entry with each bomb for its payload."""
    fields = header_fields(victim.entry)
    for bomb in bombs(victim.executable):
        yield Forgery(f"bomb: {bomb.name}", sealed({**fields, **bomb.header()}, bomb.payload), By.PAYLOAD)


def _of_another(rng: random.Random, victim: Victim, other: Victim) -> Iterator[Forgery]:
    """Wrong key, wrong target, and splices that do not fit."""
    ours, theirs = header_fields(victim.entry), header_fields(other.entry)
    payload, foreign = payload_of(victim.entry), payload_of(other.entry)
    yield Forgery("entry of another key", other.raw)
    yield Forgery("their key over our components", sealed({**ours, "key": theirs["key"]}, payload))
    yield Forgery("our key over their components", sealed({**theirs, "key": ours["key"]}, foreign))
    yield Forgery("their components under our key", sealed({**ours, "components": theirs["components"]}, payload))
    target = [i for i, part in enumerate(ours["components"]) if part["name"].startswith("target.")]
    at = rng.choice(target)
    components = [*ours["components"]]
    components[at] = {**components[at], "text": "another"}
    yield Forgery("another target under our key", sealed({**ours, "components": components}, payload))
    yield Forgery("a component less", sealed({**ours, "components": _without(ours["components"], at)}, payload))
    yield Forgery(
        "a component more",
        sealed({**ours, "components": [*ours["components"], {"name": "z", "text": ""}]}, payload),
    )
    shuffled = ours["components"][::-1]
    yield Forgery("components in another order", sealed({**ours, "components": shuffled}, payload))
    scheme = ours["key"].replace("ttc1-", "ttc0-")
    yield Forgery("another scheme", sealed({**ours, "key": scheme}, payload))
    yield Forgery("their payload under our header", sealed(ours, foreign), By.PAYLOAD)
    yield Forgery("our payload under their header", sealed(theirs, payload))


def _without(items: list[Any], at: int) -> list[Any]:
    return items[:at] + items[at + 1 :]


def _bent(rng: random.Random, victim: Victim) -> Iterator[Forgery]:
    """Versions, lengths and codecs that a reader must not take."""
    fields, payload = header_fields(victim.entry), payload_of(victim.entry)
    header = canonical_json(fields)
    yield Forgery("version to come", sealed(header, payload, version=rng.choice((2, 3, 9, 65535))))
    yield Forgery("version 0", sealed(header, payload, version=0))
    yield Forgery("reserved bits", sealed(header, payload, zero=1 << rng.randrange(16)))
    yield Forgery("another magic", sealed(header, payload, magic=flip(rng, victim.raw[:8], 1)))
    lie = rng.choice((-64, -1, 1, 31, 32, 33, 64))
    yield Forgery("header longer or shorter than told", sealed(header, payload, header_bytes=len(header) + lie))
    yield Forgery("payload longer or shorter than told", sealed(header, payload, payload_bytes=len(payload) + lie))
    huge = rng.choice((1 << 30, 2 << 30, 1 << 40, 1 << 63, (1 << 64) - 1))
    yield Forgery("payload of a huge length", sealed(header, payload, payload_bytes=huge))
    over = rng.choice((MAX_HEADER_BYTES + 1, 1 << 31))
    yield Forgery("header of a huge length", sealed(header, payload, header_bytes=over))
    yield Forgery("unknown codec", sealed({**fields, "codec": rng.choice(("lz4", "ZSTD", "", "zstd "))}, payload))
    size = fields["executable_bytes"] + rng.choice((-1, 1, 7, 1 << 20, -(1 << 10)))
    told = {**fields, "executable_bytes": size}
    yield Forgery("another length of the executable", sealed(told, payload), By.PAYLOAD)
    yield Forgery("junk behind the payload", sealed(header, payload + rng.randbytes(rng.randint(1, 99))), By.PAYLOAD)
    yield Forgery("payload cut short", sealed(header, payload[: rng.randrange(len(payload))]), By.PAYLOAD)
    if fields["codec"] == "raw":
        yield Forgery("raw called zstd", sealed({**fields, "codec": "zstd"}, payload), By.PAYLOAD)


def _consistent(rng: random.Random, victim: Victim, other: Victim) -> Iterator[Forgery]:
    """The right key and components, and another executable, or other words in the header."""
    fields, payload = header_fields(victim.entry), payload_of(victim.entry)
    told = {name: header_fields(other.entry)[name] for name in ("codec", "executable_bytes")}
    spliced = sealed({**fields, **told}, payload_of(other.entry))
    yield Forgery("their executable under our key", spliced, By.DIGEST)
    noise = rng.randbytes(len(victim.executable))
    raw = {**fields, "codec": "raw", "executable_bytes": len(noise)}
    yield Forgery("any executable under our key", sealed(raw, noise), By.DIGEST)
    yield Forgery("payload flipped, trailer made anew", sealed(fields, flip(rng, payload, 1)), By.DIGEST)
    header = canonical_json(fields)
    yield Forgery("header flipped, trailer made anew", sealed(flip(rng, header, 1), payload), By.DIGEST)
    words = {**fields, "producer": "somebody else", "compile_seconds": 1e8}
    yield Forgery("other words in the header", sealed(words, payload), By.DIGEST)
    if fields["codec"] == "zstd":
        packed = {**fields, "codec": "raw", "executable_bytes": len(payload)}
        yield Forgery("zstd called raw", sealed(packed, payload), By.DIGEST)
