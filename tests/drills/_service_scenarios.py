"""The faults of a service, each as a way to break what listens at an address for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from support import peers
from support.faultproxy import Fault, FaultProxy
from support.rawserver import RawServer, Script

FIRST_MS: Final = 100.0
"""The connect budget is 50 ms."""

LATER_MS: Final = 2.0
ANSWER_MS: Final = 2000.0
"""What a service may take to answer, and between two pieces of a body."""

BODY_PART_MS: Final = 20.0
RESET_MS: Final = 50.0
"""What the proxy waits before it resets."""

SEED: Final = 20261130

Break = Callable[[FaultProxy], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One fault.

    Args:
        breaks: makes the service at the proxy's address faulty for the time of the block.
        waits_ms: what the first look-up must wait for, beside FIRST_MS.
        later_ms: what the median of the later ones may add.
        asks_known: asks for what the service has, because the fault lies in bodies.
        full_only: takes too long for the short form.
    """

    name: str
    breaks: Break
    waits_ms: float = 0.0
    later_ms: float = LATER_MS
    asks_known: bool = False
    full_only: bool = False


def by_proxy(**fault: Any) -> Break:
    """The proxy bends what the real service says."""

    @contextmanager
    def breaks(proxy: FaultProxy) -> Iterator[None]:
        proxy.fault = Fault(**fault)
        try:
            yield
        finally:
            proxy.fault = None

    return breaks


def by_peer(listening: Callable[[int], AbstractContextManager[object]]) -> Break:
    """Something else listens at the service's address."""

    @contextmanager
    def breaks(proxy: FaultProxy) -> Iterator[None]:
        with dead(proxy), listening(proxy.port):
            yield

    return breaks


def by_script(script: Callable[[], Script]) -> Break:
    """A server of a few lines listens at the service's address."""
    return by_peer(lambda port: RawServer(script(), port))


@contextmanager
def dead(proxy: FaultProxy) -> Iterator[None]:
    """Nothing listens."""
    proxy.refuse()
    try:
        yield
    finally:
        proxy.listen()


@contextmanager
def redirecting(proxy: FaultProxy) -> Iterator[None]:
    """Sends everybody to another server, which nobody must ask."""
    with RawServer(lambda _: None) as other:
        with by_script(lambda: peers.page(302, Location=f"{other.url}/v1/default/entries/x"))(proxy):
            yield
        assert other.connections == 0, "a redirect was followed"


SCENARIOS: Final = (
    Scenario(name="dead", breaks=dead),
    Scenario(name="black_hole", breaks=by_peer(peers.black_hole)),
    Scenario(name="hung", breaks=by_script(peers.never), waits_ms=ANSWER_MS),
    Scenario(name="deaf", breaks=by_peer(peers.deaf), waits_ms=ANSWER_MS, full_only=True),
    Scenario(name="dripping_head", breaks=by_proxy(drip_seconds=0.05), waits_ms=ANSWER_MS, full_only=True),
    Scenario(name="answer_in_5s", breaks=by_proxy(delay_seconds=5.0), waits_ms=ANSWER_MS, full_only=True),
    Scenario(name="stopping_body", breaks=by_script(peers.body_stops), waits_ms=ANSWER_MS, full_only=True),
    Scenario(name="random_bytes", breaks=by_script(partial(peers.garbage, SEED))),
    Scenario(name="other_protocols", breaks=by_script(peers.other_protocol)),
    Scenario(name="endless_head", breaks=by_script(peers.endless_head)),
    Scenario(name="endless_interim", breaks=by_script(peers.endless_interim)),
    Scenario(name="status_500", breaks=by_proxy(status=500)),
    Scenario(name="status_503", breaks=by_proxy(status=503, retry_after="1")),
    Scenario(name="redirect", breaks=redirecting),
    Scenario(name="login_page", breaks=by_script(partial(peers.page, 200))),
    Scenario(name="foreign_404", breaks=by_script(partial(peers.page, 404))),
    Scenario(name="gzip", breaks=by_script(peers.gzipped)),
    *(
        Scenario(name=f"length_{kind}", breaks=by_script(partial(peers.wrong_length, kind)))
        for kind in ("longer", "negative", "two", "none", "chunked")
    ),
    Scenario(name="reset", breaks=by_proxy(reset_at=0), waits_ms=RESET_MS),
    Scenario(name="cut_head", breaks=by_proxy(cut_at=40)),
    # From here on each is asked for, since damage or size says nothing of the service, or uploads succeed in between.
    # Each costs its part of a body, most of it in the proxy, until the credit of a slow remote is used up.
    *(
        Scenario(name=f"length_{kind}", breaks=by_script(partial(peers.wrong_length, kind)), later_ms=BODY_PART_MS)
        for kind in ("shorter", "huge")
    ),
    Scenario(name="cut_body", breaks=by_proxy(cut_at=5000), asks_known=True, later_ms=BODY_PART_MS),
    Scenario(
        name="reset_body",
        breaks=by_proxy(reset_at=5000),
        asks_known=True,
        waits_ms=RESET_MS,
        later_ms=RESET_MS + BODY_PART_MS,
    ),
    Scenario(name="flipped_bit", breaks=by_proxy(flip_at=5000), asks_known=True, later_ms=BODY_PART_MS),
)
