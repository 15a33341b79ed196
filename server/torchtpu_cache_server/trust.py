"""Who may ask for what while there is no authentication: loopback is not trust.

- Every request needs a loopback Host, so that a web page whose name was rebound to 127.0.0.1 gets nowhere, and no
  foreign Origin.
- What changes anything needs a peer process of our own uid. The kernel says whose the other end of the connection is
  (`/proc/net/tcp`); where it does not, the answer is no.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torchtpu_cache_core.endpoint import loopback_addresses
from torchtpu_cache_core.errors import FailureKind
from torchtpu_cache_server.problems import ProblemKind, Refusal, header

Address = tuple[str, int]
PeerUid = Callable[[Address, Address], int | None]

_ESTABLISHED: Final = "01"


def is_loopback(host: str) -> bool:
    """Whether a host as in a URL (`localhost`, `127.0.0.1`, `[::1]`) can only mean this machine."""
    is_v6 = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if is_v6 else host
    return (":" in name) == is_v6 and bool(loopback_addresses(name))


def split_host(value: str) -> str:
    """The host of a Host header, without its port."""
    host, colon, port = value.rpartition(":")
    if colon and port.isascii() and port.isdigit() and (not host.startswith("[") or host.endswith("]")):
        return host
    return value


@functools.lru_cache(maxsize=256)
def _is_ours(host: str) -> bool:
    """`is_loopback` of a Host header; every request of a client has the same."""
    return is_loopback(split_host(host))


def peer_uid(peer: Address, server: Address, folder: Path = Path("/proc/net")) -> int | None:
    """The uid of the process at the other end of a loopback TCP connection, or None if the kernel does not say.

    Only an established connection with an open socket counts: the kernel shows uid 0 for one that its owner closed.

    Raises:
        OSError: the kernel could not be asked in this moment, such as for want of a descriptor.
    """
    is_v6 = ":" in peer[0]
    wanted = [_kernel_form(peer), _kernel_form(server)]
    try:
        with open(folder / ("tcp6" if is_v6 else "tcp"), encoding="ascii") as table:
            for line in table:
                fields = line.split(None, 10)
                if fields[1:3] == wanted:
                    return int(fields[7]) if fields[3] == _ESTABLISHED and fields[9] != "0" else None
    except (FileNotFoundError, PermissionError, ValueError, IndexError):
        return None
    return None


def _kernel_form(address: Address) -> str:
    host, port = address[0], address[1]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    # The kernel prints each 32-bit word as a number in the machine's own byte order.
    words = (int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4))
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


class LoopbackTrust:
    """The rules above as checks on an ASGI scope.

    Args:
        own_uid: whose processes may write.
        find_uid: finds the uid of a peer.
    """

    def __init__(self, *, own_uid: int | None = None, find_uid: PeerUid = peer_uid) -> None:
        self._own_uid = os.geteuid() if own_uid is None else own_uid
        self._find_uid = find_uid

    def check(self, scope: Any) -> None:
        """Refusal (400, 403 or 421) of a request that did not come from this machine on purpose."""
        host = header(scope["headers"], b"host")
        if host is None:
            raise Refusal(400, ProblemKind.INVALID, "the request has no Host header", closes=True)
        if not _is_ours(host):
            raise Refusal(
                421,
                ProblemKind.MISDIRECTED,
                "this service answers only to localhost, 127.0.0.1 and [::1] in the Host header",
                closes=True,
            )
        origin = header(scope["headers"], b"origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            raise Refusal(403, ProblemKind.ORIGIN, "requests from other web origins are refused", closes=True)

    def check_writer(self, scope: Any) -> None:
        """Refusal of a writer that is not a process of our own user: 403, and 503 where that cannot be known now.

        A client takes 403 for the last word, and forgets the entry. Reads a file of the kernel's: may block.
        """
        client, server = scope.get("client"), scope.get("server")
        uid = None
        if client and server and server[1] is not None:
            try:
                uid = self._find_uid((client[0], client[1]), (server[0], server[1]))
            except OSError:
                raise Refusal(
                    503, FailureKind.IO, "the kernel could not be asked whose process this is", retry_after_seconds=1.0
                ) from None
            except ValueError:
                uid = None
        if uid is None:
            raise Refusal(
                403,
                ProblemKind.PEER,
                "the kernel does not say whose process this is, and without authentication only"
                " processes of the service's own user may write",
                closes=True,
            )
        if uid != self._own_uid:
            raise Refusal(
                403,
                ProblemKind.PEER,
                "without authentication only processes of the service's own user may write",
                closes=True,
            )
