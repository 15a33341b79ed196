"""Hostile HTTP as bytes: what a broken, careless or malicious client may send, from a seed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torchtpu_cache_core import wire
from torchtpu_cache_core.entry import Entry
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest
from torchtpu_cache_core.testing.entries import corruptions, entry_for, rival_of

_METHODS: Final = [
    *[b"GET", b"HEAD", b"PUT", b"PUT", b"PUT", b"DELETE", b"POST", b"OPTIONS", b"PATCH", b"TRACE", b"CONNECT"],
    *[b"PROPFIND", b"PRI", b"get", b"", b"GET\t", b"M-SEARCH", b"A" * 300, b"\x00", b"G\xc3\x89T"],
]
_VERSIONS: Final = [*[b" HTTP/1.1"] * 12, b" HTTP/1.0", b" HTTP/0.9", b" HTTP/2.0", b"", b" HTTP/1.1 ", b" X"]
_HOSTS: Final = [
    *[[b"Host: localhost"]] * 12,
    *([], [b"Host: elsewhere"], [b"Host: localhost"] * 2, [b"Host:"], [b"Host: [::1"], [b"Host: localhost:99999999"]),
]
_WRONG_LENGTHS: Final = [b"-1", b"+5", b"0x10", b"1,1", b"", b"1 1", b"9" * 30, b"999999999", b"1e3", b"\xb2", b"0"]
_HEADERS: Final = {
    b"Expect": [b"100-continue", b"100-Continue", b"200-maybe", b""],
    b"Range": [b"bytes=0-9", b"bytes=-1", b"bytes=9-0", b"bytes=" + b"0-1," * 500, b"items=1"],
    b"If-None-Match": [b"*", b'"', b'""', b'W/"x"', b'"a",' * 2000, b"\xff"],
    b"Connection": [b"close", b"keep-alive", b"close, keep-alive", b"upgrade", b"x" * 2000],
    b"Upgrade": [b"websocket", b"h2c", b"TLS/1.0", b"\x7f"],
    b"Transfer-Encoding": [
        b"chunked",
        b"chunked",
        b"gzip, chunked",
        b"chunked, chunked",
        b"identity",
        b"xchunked",
        b"",
    ],
    b"Content-Encoding": [b"gzip", b"identity", b"IDENTITY", b"x"],
    b"Content-Type": [wire.ENTRY_CONTENT_TYPE.encode(), b"application/json", b"text/plain; charset=utf-7", b"/"],
    b"Origin": [b"http://localhost", b"http://elsewhere", b"null"],
    b"Accept": [b"*/*;q=0", b"x" * 4000],
    b"Content-Length": _WRONG_LENGTHS,
    b"X-Forwarded-For": [b"10.0.0.1"],
}
_BROKEN_LINES: Final = [
    b"no colon",
    b": no name",
    b"Na me: x",
    b"X: a\x00b",
    b" folded",
    b"X: a\rb",
    b"X\x80: y",
    b"X : y",
]
_BROKEN_CHUNKS: Final = [b"zz\r\n", b"-1\r\n", b"f" * 17 + b"\r\n", b"5\r\nab", b"0\r\n", b"\r\n\r\n", b"1\r\nab\r\n"]
_TRAILERS: Final = [b"", b"", b"X: y\r\n", b"Host: elsewhere\r\n", b"bad trailer\r\n", b"Y: " + b"z" * 70_000 + b"\r\n"]
_SPLINTERS: Final = [b"\r\n", b"\n", b"\r", b"\x00", b":", b" ", b"\xff", b"\r\n\r\n", b"%"]


@dataclass(frozen=True, slots=True)
class Case:
    """One connection's worth.

    Args:
        pieces: what is sent, one after another.
        end: `wait` for answers, `close` at once, or `reset`.
        plain: the methods of requests that any server must understand, and must answer; empty where anything goes.
    """

    pieces: tuple[bytes, ...]
    end: str
    plain: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = b"|".join(self.pieces)
        return f"{self.end}: {shown[:1500]!r}{'...' if len(shown) > 1500 else ''}"


class Fuzzer:
    """Cases from a seed; the same seed and entries give the same ones.

    Args:
        standing: what the service has, and reads are asked of. Nothing that is sent deletes them on purpose.
    """

    def __init__(self, seed: int, standing: Sequence[Entry]) -> None:
        self._random = random.Random(seed)
        # Few, so that puts, conflicts, reads and deletes of one key meet.
        self._fleeting = [entry_for(f"fleeting {i}", size_bytes=size) for i, size in enumerate((100, 2000, 70_000))]
        self._fleeting += [rival_of(entry) for entry in self._fleeting]
        self._readable = [*standing, *self._fleeting]
        self._bad = [found.data for found in corruptions(self._fleeting[0]) if len(found.data) < 200_000]

    def case(self) -> Case:
        """The next one."""
        source = self._random
        count = source.choice((1, 1, 1, 2, 3, 8, 60))
        kind = source.random()
        if kind < 0.3:
            plain = [self._plain() for _ in range(min(count, 30))]  # more than 32 may not wait
            methods = tuple(raw[:5].split()[0].decode() for raw in plain)
            return Case(self._split(b"".join(plain)), "wait", methods)
        raw = b"".join(self._request() for _ in range(count))
        if kind < 0.6:
            raw = self._mutated(raw)
        return Case(self._split(raw), source.choice(("wait", "wait", "wait", "close", "reset")))

    def _plain(self) -> bytes:
        source = self._random
        entry = source.choice(self._readable)
        path = wire.entry_path(DEFAULT_NAMESPACE, entry.key)
        match source.randrange(5):
            case 0:
                return _asks(f"GET {path}")
            case 1:
                return _asks(f"HEAD {path}")
            case 2:
                keys = json.dumps({"keys": [str(entry.key)] * source.choice((0, 1, 100))})
                return _asks("POST /v1/default/lookup", keys.encode())
            case 3:
                return _asks(f"GET /v1/default/entries?limit={source.randrange(2000)}")
            case _:
                entry = source.choice(self._fleeting)
                digest = f"Content-Digest: {wire.content_digest(entry.digest)}"
                return _asks(f"PUT {wire.entry_path(DEFAULT_NAMESPACE, entry.key)}", bytes(entry.buffer), digest)

    def _request(self) -> bytes:
        source = self._random
        entry = source.choice(self._fleeting)
        body = self._body(entry)
        headers = self._headers(body)
        source.shuffle(headers)
        method = source.choice(_METHODS)
        line = method + b" " + self._target(method, entry) + source.choice(_VERSIONS)
        sent = self._chunked(body) if any(h.startswith(b"Transfer-Encoding") for h in headers) else body
        return b"\r\n".join((line, *headers, b"", b"")) + sent

    def _target(self, method: bytes, entry: Entry) -> bytes:
        source = self._random
        entry = entry if method in (b"PUT", b"DELETE") else source.choice(self._readable)
        path, key = wire.entry_path(DEFAULT_NAMESPACE, entry.key).encode(), str(entry.key).encode()
        if source.random() < 0.5:
            return path
        key = str(source.choice(self._fleeting).key).encode()
        path = b"/v1/default/entries/" + key
        return source.choice(
            [
                path + b"?" + source.choice([b"x=y", b"limit=-1", b"\x00", b"%", b"a" * 3000]),
                path + source.choice([b"/", b"//", b"/..", b"#x", b"%00", b"%2f", b";x", b"\xff", b" "]),
                *(path.upper(), path.replace(b"/", b"//"), path.replace(b"-", b"%2d")),
                b"/v1/default/entries/../entries/" + key,
                b"/v1/default/entries/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
                b"/v1/../../etc/passwd",
                b"/v1/"
                + source.choice([b"..", b"a" * 64, b"A", b"-x", b"%00", b"\xc3\xa4", b"."])
                + b"/entries/"
                + key,
                b"/v1/default/entries/" + source.choice([b"", b"x", key[:-1], key + b"0", key[:10] + b"g" + key[11:]]),
                *(b"http://localhost" + path, b"http://elsewhere" + path, b"localhost:80", b"*", b""),
                b"/" + b"a" * source.choice((100, 8000, 70_000)),
                *(b"/v1/default/lookup", b"/v1/default/stats", b"/healthz", b"/metrics", b"/docs", b"/"),
                b"/v1/default/entries?" + source.choice([b"limit=0", b"cursor=x", b"prefix=%ff", b"limit=1e9", b"&&&"]),
            ]
        )

    def _headers(self, body: bytes) -> list[bytes]:
        source = self._random
        headers = list(source.choice(_HOSTS))
        if source.random() < 0.8:
            headers.append(b"Content-Length: %d" % len(body))
        if source.random() < 0.7:
            headers.append(b"Content-Digest: " + self._digest(body))
        headers += [name + b": " + source.choice(v) for name, v in _HEADERS.items() if source.random() < 0.08]
        match source.randrange(40):
            case 0:
                headers += [b"X-%d: y" % i for i in range(source.choice((50, 90, 100, 101, 500)))]
            case 1:
                headers.append(b"X-Long: " + b"a" * source.choice((8000, 60_000, 66_000, 120_000, 300_000)))
            case 2:
                headers.append(source.choice(_BROKEN_LINES))
            case 3:
                headers.append(source.choice(headers) if headers else b"X: y")
            case 4:
                tags = [
                    wire.etag(source.choice(self._readable).digest).encode() for _ in range(source.choice((1, 400)))
                ]
                headers.append(b"If-None-Match: " + b", ".join(tags))
        return headers

    def _digest(self, body: bytes) -> bytes:
        source = self._random
        right = wire.content_digest(Digest(hashlib.sha256(body).hexdigest())).encode()
        if source.random() < 0.7:
            return right
        return source.choice(
            [
                *(b"", b"sha-256=::", right[:-2] + b":", right.replace(b"256", b"512"), b"md5=:aa:, " + right),
                *(b"\xff" * 40, b"sha-256=:" + b"A" * 44 + b":", right + b", " + right, b"sha-256=" + b"=" * 5000),
            ]
        )

    def _body(self, entry: Entry) -> bytes:
        source = self._random
        whole = bytes(entry.buffer)
        match source.randrange(6):
            case 0:
                return b""
            case 1 | 2:
                return whole
            case 3:
                return source.choice(self._bad)
            case 4:
                return source.randbytes(source.choice((1, 100, 5000, 200_000)))
            case _:
                return whole[: source.randrange(len(whole))]

    def _chunked(self, body: bytes) -> bytes:
        source = self._random
        if source.random() < 0.3:
            return source.choice(_BROKEN_CHUNKS)
        step = source.choice((1, 100, 4096)) if len(body) < 5000 else 4096
        extension = source.choice([b"", b"", b";a=b", b";" + b"x" * 200])
        chunks = [body[i : i + step] for i in range(0, len(body), step)]
        sent = b"".join(b"%x" % len(chunk) + extension + b"\r\n" + chunk + b"\r\n" for chunk in chunks)
        return sent + b"0\r\n" + source.choice(_TRAILERS) + b"\r\n"

    def _mutated(self, raw: bytes) -> bytes:
        """A few bytes flipped, dropped, doubled or put in, near the beginning."""
        source, data = self._random, bytearray(raw)
        for _ in range(source.choice((1, 1, 2, 5, 20))):
            at = source.randrange(max(1, min(len(data), 1500)))
            match source.randrange(5):
                case 0 if data:
                    data[at] ^= 1 << source.randrange(8)
                case 1:
                    del data[at : at + source.choice((1, 1, 10, 100))]
                case 2:
                    data[at:at] = source.choice(_SPLINTERS)
                case 3:
                    data[at:at] = data[at : at + source.choice((5, 50, 500))]
                case _:
                    data[at:at] = source.randbytes(source.choice((1, 4, 64)))
        return bytes(data)

    def _split(self, raw: bytes) -> tuple[bytes, ...]:
        source = self._random
        if source.random() < 0.5 or len(raw) < 2:
            return (raw,)
        cuts = sorted(source.randrange(len(raw)) for _ in range(source.choice((1, 2, 8))))
        return tuple(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True))


def _asks(line: str, body: bytes | None = None, *headers: str) -> bytes:
    lengths = [] if body is None else [f"Content-Length: {len(body)}"]
    return "\r\n".join((f"{line} HTTP/1.1", "Host: localhost", *lengths, *headers, "", "")).encode() + (body or b"")
