"""The wire between a real service and a real client, for the corruption drill: heads and bodies, both ways."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from drills._corruption_disk import LARGEST_BYTES
from drills._corruption_service import Client
from support.damage import ANYWHERE, OF_ENTRIES, By, accident, bombed, forgeries
from support.rawserver import RawServer, received
from support.replies import manifest_of
from support.service import running_service
from support.tally import PeakMemory, Tally
from support.victims import Victim, victim, victims
from torchtpu_cache.remote import RemoteStore
from torchtpu_cache_core import wire
from torchtpu_cache_core.errors import StoreError
from torchtpu_cache_core.names import DEFAULT_NAMESPACE, Digest, Key, Namespace

_KNOWN: Final = 24
_PATIENCE_SECONDS: Final = 0.25
_HONEST_EVERY: Final = 10
_MANIFEST: Final = wire.MANIFEST_HEADER.lower().encode()


@dataclass(frozen=True, slots=True)
class Message:
    """A request or an answer: its head to the empty line, and its body."""

    head: bytes
    body: bytes

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    def with_header(self, name: bytes, value: bytes | None) -> Message:
        """With one header replaced or, for None, left out."""
        lines = self.head.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(name.lower() + b":")]
        added = [] if value is None else [name + b": " + value]
        return replace(self, head=b"\r\n".join([*kept[:-2], *added, *kept[-2:]]))

    def with_body(self, body: bytes) -> Message:
        """With another body, and its length."""
        return replace(self.with_header(b"content-length", b"%d" % len(body)), body=body)


Bend = Callable[[Message], bytes]


class Bender:
    """A proxy that bends one message at a time: the next answer to a GET, or the next PUT.

    It closes both connections after what it has bent, unless `stays_open`: then what was cut is waited for.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._server = RawServer(self._serve)
        self.bend_answer: Bend | None = None
        self.bend_request: Bend | None = None
        self.stays_open = False

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._server.close()

    def _serve(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._upstream_port), 10) as upstream:
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                asked = _read(client, answers=False)
                # Both now: whoever still answers a client that gave up must not bend the answer of the next one.
                bend, self.bend_request = self.bend_request, None
                bend_answer, self.bend_answer = self.bend_answer, None
                raw = asked.raw if bend is None else bend(asked)
                upstream.sendall(raw)
                if not _is_whole(raw):
                    upstream.shutdown(socket.SHUT_WR)  # what is missing never comes
                answered = _read(upstream, answers=True)
                client.sendall(answered.raw if bend_answer is None else bend_answer(answered))
                if bend_answer is not None and not self.stays_open:
                    return


def _is_whole(request: bytes) -> bool:
    """Whether a service waits for no more."""
    head, end, body = request.partition(b"\r\n\r\n")
    found = re.findall(rb"(?mi)^content-length: *([0-9]{1,9})\r?$", head)
    return bool(end) and len(body) >= (int(found[0]) if found else 0)


def _read(connection: socket.socket, *, answers: bool) -> Message:
    data = b""
    while b"\r\n\r\n" not in data:
        data += received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    length = int(lengths[0].partition(b":")[2]) if lengths else 0
    if not answers and b"expect: 100-continue" in head.lower():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = b"\r\n".join(line for line in head.split(b"\r\n") if not line.lower().startswith(b"expect:"))
    while len(body) < length:
        body += received(connection)
    return Message(head + b"\r\n\r\n", body)


class WireAttack:
    """Bends answers to GET, each asked for by a node."""

    def __init__(self, port: int, direct: RemoteStore, tally: Tally) -> None:
        self.tally = tally
        self.rng = random.Random(tally.seed)
        self.known = victims(_KNOWN, large=1, name="sent")
        self.largest = victim("the largest", LARGEST_BYTES, packs=False)
        self.bender = Bender(port)
        self.client = Client(self.bender.url, tally, [*self.known, self.largest])
        self.client.remote.close()
        self.client.remote = RemoteStore(
            self.bender.url,
            DEFAULT_NAMESPACE,
            connect_seconds=5.0,
            answer_seconds=_PATIENCE_SECONDS,
            idle_seconds=_PATIENCE_SECONDS,
        )
        for each in [*self.known, self.largest]:
            direct.put(each.entry)
        self.direct = direct

    def memory(self) -> None:
        """What a hostile service may send with all digests right: bombs, and lengths that it only claims."""
        assert self.direct.get(self.largest.key) is not None
        target = self.known[0]
        self.peak = PeakMemory()
        for forgery in bombed(target):
            self._ask(forgery.kind, target, lambda sent, data=forgery.data: _announced(sent, target, data).raw)
        for claimed in (1 << 29, (2 << 30) - 1, 2 << 30, 1 << 40, 10**17):
            self._ask(
                "a huge Content-Length",
                target,
                lambda sent, claimed=claimed: sent.with_header(b"content-length", b"%d" % claimed).raw,
            )

    def run(self, count: int) -> None:
        while self.tally.cases < count:
            target, other = self.rng.sample(self.known, 2)
            kind, bend, refused = self._kind(target, other)
            self.bender.stays_open = self.rng.random() < 0.2
            self._ask(kind, target, bend, refused=refused)
            if self.tally.cases % _HONEST_EVERY == 0:
                with self.tally.unharmed(kind):
                    self.tally.check("not_replaced", f"an honest answer after {kind}", self.client.is_sound(target))
            self.tally.say(count)

    def _ask(self, kind: str, target: Victim, bend: Bend, *, refused: bool = True) -> None:
        self.bender.bend_answer = bend
        with self.tally.case(kind):
            answer = self.client.ask(kind, target, refused=refused)
            self.tally.check("counted_as_miss", kind, answer != "miss")

    def _kind(self, target: Victim, other: Victim) -> tuple[str, Bend, bool]:
        """A kind, how it bends the answer, and whether nothing of it may be served."""
        rng, chosen = self.rng, self.rng.random()
        if chosen < 0.25:
            kind = rng.choice(list(ANYWHERE))
            # Much of a head is said for nobody: a date, a reason, the case of a letter.
            return f"head: {kind}", lambda sent: ANYWHERE[kind](rng, sent.head) + sent.body, False
        if chosen < 0.35:
            kind, body = accident(rng, OF_ENTRIES, target.raw)
            # What stands behind the length that was announced is no part of the answer.
            return f"body: {kind}", lambda sent: sent.head + body, not body.startswith(target.raw)
        if chosen < 0.45:
            kind, data = accident(rng, OF_ENTRIES, target.raw)
            return f"body and length: {kind}", lambda sent: sent.with_body(data).raw, True
        if chosen < 0.5:
            return "answer cut", lambda sent: sent.raw[: rng.randrange(len(sent.raw))], True
        if chosen < 0.7:
            return self._bent_head(target, other)
        forgery = rng.choice(list(forgeries(rng, target, other)))
        if chosen < 0.85 or forgery.by is By.DIGEST:
            bend = rng.choice((_as_it_was, _with_etag))
            return f"forged: {forgery.kind}", lambda sent: bend(sent, forgery.data).raw, True
        return f"forged and announced: {forgery.kind}", lambda sent: _announced(sent, target, forgery.data).raw, True

    def _bent_head(self, target: Victim, other: Victim) -> tuple[str, Bend, bool]:
        rng = self.rng
        length = rng.choice((b"0", b"-1", b"+5", b"0x10", b"9" * 30, b"1, 2", b"", b"%d" % (len(target.raw) - 1)))
        status = rng.choice((b"100", b"201", b"204", b"206", b"301", b"304", b"404", b"500", b"999", b"abc"))
        foreign = manifest_of(target.entry, Namespace("other")).to_header().encode()
        theirs = manifest_of(other.entry).to_header().encode()
        etag = b'"' + other.entry.digest.encode() + b'"'
        kinds: dict[str, Bend] = {
            "another length": lambda sent: sent.with_header(b"content-length", length).raw,
            "two lengths": lambda sent: sent.head[:-2] + b"content-length: 7\r\n\r\n" + sent.body,
            "chunked": lambda sent: sent.with_header(b"transfer-encoding", b"chunked").raw,
            "packed": lambda sent: sent.with_header(b"content-encoding", b"gzip").raw,
            "another type": lambda sent: sent.with_header(b"content-type", b"text/html").raw,
            "no manifest": lambda sent: sent.with_header(_MANIFEST, None).raw,
            "another entry's manifest": lambda sent: sent.with_header(_MANIFEST, theirs).raw,
            "another namespace's manifest": lambda sent: sent.with_header(_MANIFEST, foreign).raw,
            "no ETag": lambda sent: sent.with_header(b"etag", None).raw,
            "another ETag": lambda sent: sent.with_header(b"etag", etag).raw,
            "another status": lambda sent: sent.head[:9] + status + sent.head[12:] + sent.body,
            "another protocol": lambda sent: b"HTTP/2.0" + sent.raw[8:],
            "an answer within an answer": lambda sent: sent.head + sent.raw,
            "another key's answer": lambda sent: _announced(sent, other, other.raw).raw,
            "another key's answer, our manifest": lambda sent: _as_it_was(sent, other.raw).raw,
        }
        kind = rng.choice(list(kinds))
        return f"head: {kind}", kinds[kind], True


def _as_it_was(sent: Message, body: bytes) -> Message:
    """Another body under the service's own words."""
    return sent.with_body(body)


def _with_etag(sent: Message, body: bytes) -> Message:
    """Another body with its ETag and digest; the manifest still names the honest one."""
    digest = Digest(hashlib.sha256(body).hexdigest())
    sent = sent.with_header(b"etag", wire.etag(digest).encode())
    return sent.with_header(b"content-digest", wire.content_digest(digest).encode()).with_body(body)


def _announced(sent: Message, target: Victim, body: bytes) -> Message:
    """Another body with everything that names it: what a service would send that lies."""
    digest = Digest(hashlib.sha256(body).hexdigest())
    manifest = replace(manifest_of(target.entry), digest=digest, size_bytes=max(1, len(body)))
    return _with_etag(sent, body).with_header(_MANIFEST, manifest.to_header().encode())


def attack_answers(folder: Path, tally: Tally, count: int) -> None:
    """Answers to GET."""
    with running_service(folder / "answering") as service, RemoteStore(service.url, DEFAULT_NAMESPACE) as direct:
        attack = WireAttack(service.port, direct, tally)
        with contextlib.closing(attack.bender), contextlib.closing(attack.client):
            attack.memory()
            attack.run(count)
            tally.rss_growth_bytes = attack.peak.growth_bytes()


# ---- uploads ---------------------------------------------------------------------------------------------------------


class UploadAttack:
    """Bends PUTs: what the service acknowledges it has, and it has nothing but what was sent."""

    def __init__(self, bender: Bender, direct: RemoteStore, tally: Tally) -> None:
        self.bender = bender
        self.direct = direct
        self.tally = tally
        self.rng = random.Random(tally.seed)
        self.sent: dict[Key, Victim] = {}

    def run(self, count: int) -> None:
        other = self._new(0)
        self.direct.put(other.entry)
        while self.tally.cases < count:
            target = self._new(len(self.sent))
            kind, bend, refused = self._kind(target, other)
            self.bender.bend_request = bend
            with self.tally.case(kind):
                acknowledged = self._put(target)
            with self.tally.unharmed(kind):
                self._look(kind, target, acknowledged=acknowledged, refused=refused)
            if self.tally.cases % _KNOWN == 0:
                self._look_at_all()
            self.tally.say(count)
        self._look_at_all()

    def _new(self, number: int) -> Victim:
        made = victim(f"uploaded {number}", 1200 + 7 * number % 4000, packs=number % 2 == 0)
        self.sent[made.key] = made
        return made

    def _put(self, target: Victim) -> bool:
        # A client of its own for each: one that has seen an upload break off, or has a connection to ask again on,
        # would not send what is to be bent.
        with RemoteStore(
            self.bender.url,
            DEFAULT_NAMESPACE,
            connect_seconds=5.0,
            answer_seconds=_PATIENCE_SECONDS,
            idle_seconds=4 * _PATIENCE_SECONDS,
        ) as remote:
            try:
                remote.put(target.entry)
            except StoreError as error:
                self.tally.refused(error.kind)
                return False
        return True

    def _look(self, kind: str, target: Victim, *, acknowledged: bool, refused: bool) -> None:
        found = self.direct.get(target.key)
        if acknowledged or not refused:
            self.tally.check("not_replaced", kind, found is not None or not acknowledged)
        if found is not None and refused:
            self.tally.fault("accepted", kind)
        if found is None:
            return
        if found.entry.digest != target.entry.digest:
            self.tally.fault("reached_a_loader", kind)
        self.tally.served_true += 1

    def _look_at_all(self) -> None:
        """Under whatever key something was stored, it is that key's."""
        with self.tally.unharmed("a listing"):
            for info in self.direct.iterate():
                found, honest = self.direct.get(info.key), self.sent.get(info.key)
                whole = found is not None and honest is not None and found.entry.digest == honest.entry.digest
                self.tally.check("reached_a_loader", "a key that was not uploaded to", whole)
                self.direct.delete(info.key)

    def _kind(self, target: Victim, other: Victim) -> tuple[str, Bend, bool]:
        rng, chosen = self.rng, self.rng.random()
        if chosen < 0.3:
            kind = rng.choice(list(ANYWHERE))
            return f"upload's head: {kind}", lambda asked: ANYWHERE[kind](rng, asked.head) + asked.body, False
        if chosen < 0.45:
            kind, body = accident(rng, OF_ENTRIES, target.raw)
            return f"upload's body: {kind}", lambda asked: asked.head + body, not body.startswith(target.raw)
        if chosen < 0.6:
            kind, data = accident(rng, OF_ENTRIES, target.raw)
            return f"upload's body and length: {kind}", lambda asked: asked.with_body(data).raw, True
        forgery = rng.choice(list(forgeries(rng, target, other)))
        if chosen < 0.75:
            return f"upload forged: {forgery.kind}", lambda asked: asked.with_body(forgery.data).raw, True
        if forgery.by is By.HEAD and chosen < 0.9:
            return (
                f"upload forged and announced: {forgery.kind}",
                lambda asked: _digested(asked, forgery.data).raw,
                True,
            )
        kinds: dict[str, Bend] = {
            "to another key": lambda asked: asked.raw.replace(target.key.encode(), other.key.encode(), 1),
            "another digest": lambda asked: (
                asked.with_header(b"content-digest", wire.content_digest(other.entry.digest).encode()).raw
            ),
            "no digest": lambda asked: asked.with_header(b"content-digest", None).raw,
            "packed": lambda asked: asked.with_header(b"content-encoding", b"gzip").raw,
            "cut": lambda asked: asked.raw[: rng.randrange(len(asked.head), len(asked.raw))],
        }
        kind = rng.choice(list(kinds))
        return f"upload: {kind}", kinds[kind], True


def _digested(asked: Message, body: bytes) -> Message:
    """Another body, announced by its own digest."""
    digest = Digest(hashlib.sha256(body).hexdigest())
    return asked.with_header(b"content-digest", wire.content_digest(digest).encode()).with_body(body)


def attack_uploads(folder: Path, tally: Tally, count: int) -> None:
    """PUTs on their way to the service."""
    with (
        running_service(folder / "taking") as service,
        RemoteStore(service.url, DEFAULT_NAMESPACE) as direct,
        contextlib.closing(Bender(service.port)) as bender,
    ):
        UploadAttack(bender, direct, tally).run(count)
