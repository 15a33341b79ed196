"""The URL of a remote, and which hosts are this machine: the one place that says what may be spoken to.

Only loopback may be named until there is authentication: who can answer a look-up can run code in the job. So no name
has to be resolved, which could take longer than any budget, and no proxy of the environment has a say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from torchtpu_cache_core.errors import ConfigError

_URL: Final = re.compile(r"[\x21-\x7e]{1,2000}")
_PATH: Final = re.compile(r"[A-Za-z0-9._~/-]*")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the service is: built by `parse` only.

    Args:
        host: as in the URL, without brackets.
        addresses: what to connect to, in this order; no name has to be resolved.
        path: in front of every path of the protocol; empty or `/...` without a slash at its end.
    """

    tls: bool
    host: str
    port: int
    addresses: tuple[str, ...]
    path: str

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Reads the URL of a service.

        Raises:
            ConfigError: not an http(s) URL of a loopback host. The message never holds a password.
        """
        try:
            if not _URL.fullmatch(url):
                raise ValueError
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigError("the remote's URL cannot be read; it should look like http://127.0.0.1:8077") from None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError("the remote's URL must begin with http:// or https:// and name a host")
        if "@" in parts.netloc:
            raise ConfigError("the remote's URL must not hold a user name or password")
        if "?" in url or "#" in url or not _PATH.fullmatch(parts.path) or port == 0:
            raise ConfigError("the remote's URL is a host, a port and at most a plain path, without ? or #")
        addresses = loopback_addresses(host)
        if not addresses:
            raise ConfigError(
                f"the remote {host} is beyond loopback, which needs authentication that is not there yet; "
                "use http://127.0.0.1:PORT"
            )
        tls = parts.scheme == "https"
        return cls(tls, host, port or (443 if tls else 80), addresses, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """The value of the Host header, and what messages name."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def loopback_addresses(host: str) -> tuple[str, ...]:
    """The addresses of a host, as in a URL without brackets, that can only mean this machine; none for any other."""
    import ipaddress

    if host.lower() == "localhost":
        return ("127.0.0.1", "::1")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ()
    is_ours = address.is_loopback if address.version == 4 else address == ipaddress.IPv6Address("::1")
    return (host,) if is_ours else ()
