"""Which URLs and addresses may be fetched, and the limits of one fetch.

Only public addresses are allowed, unless the operator opens a network to a domain by name. `addresses` decides whether
an address is public, `urls` parses URLs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Self

from gridsieve.common.contract.errors import InvalidRequest, MediaForbidden
from gridsieve.services.preprocessing.fetch.addresses import IPAddress, IPNetwork, is_public
from gridsieve.services.preprocessing.fetch.urls import Host, Url, parse_host


@dataclass(frozen=True, slots=True)
class AllowedDomain:
    """Hosts that may be fetched from, and a network that they may lie in besides the public ones.

        cdn.example.org            that host
        *.example.org              every host below it, but not itself; so does .example.org
        *                          every host
        minio=10.20.0.0/16         that host, which may also lie in 10.20.0.0/16
        *.corp.example=10.0.0.7    every host below it, which may also lie at 10.0.0.7

    A name alone opens no private address: otherwise its DNS server would decide which internal hosts are reached. With
    `domain=network` the operator decides, metadata servers and loopback included.
    """

    host: str
    below: bool = False
    network: IPNetwork | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `domain` or `domain=network`. Raises ValueError for anything else."""
        domain, _, network = text.partition("=")
        opened = ip_network(network) if "=" in text else None
        if domain == "*":
            return cls("", below=True, network=opened)
        host = domain.removeprefix("*.").removeprefix(".")
        try:
            return cls(parse_host(host).name, host != domain, opened)
        except InvalidRequest as error:
            raise ValueError(f"{text!r} {error}") from error

    def holds(self, host: Host) -> bool:
        if not self.below:
            return host.name == self.host
        return not self.host or host.name.endswith(f".{self.host}")


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """domains: empty allows every host at public addresses. total_s: from the name lookup to the last byte; of a
    stream, to its first byte, and from each byte to the next.

    max_bytes: of one body; streams have no end, and are not stored. disk_bytes: of all open fetched media together.
    """

    schemes: frozenset[str] = frozenset({"http", "https", "rtsp", "rtsps"})
    ports: frozenset[int] = frozenset({80, 443, 554, 322})
    domains: tuple[AllowedDomain, ...] = ()
    max_bytes: int = 2**30
    disk_bytes: int = 2**32
    max_redirects: int = 5
    look_up_s: float = 10.0
    connect_s: float = 5.0
    total_s: float = 60.0

    def check_url(self, url: Url) -> None:
        """Raises MediaForbidden for a scheme, a port or a host that is not allowed."""
        if not self.schemes:
            raise MediaForbidden("may not be fetched: --fetch-schemes is empty, so this service fetches nothing")
        if url.scheme not in self.schemes:
            raise MediaForbidden(f"must start with {_either(self.schemes)}, got {url.scheme!r}: --fetch-schemes")
        if url.port not in self.ports:
            raise MediaForbidden(f"must have port {_either(self.ports)}, got {url.port}: --fetch-ports")
        if self.domains and not any(domain.holds(url.host) for domain in self.domains):
            raise MediaForbidden(f"names a host that --allow-media-domain does not allow: {url.host.name!r}")

    def admits(self, host: Host, addresses: Sequence[IPAddress]) -> bool:
        """Whether there are addresses and all of them are allowed for this host.

        A single forbidden address refuses the host: a name with both public and private addresses is an attack.
        """
        opened = [domain.network for domain in self.domains if domain.network is not None and domain.holds(host)]
        return bool(addresses) and all(
            is_public(address) or any(address in network for network in opened) for address in addresses
        )


def _either(values: frozenset[str] | frozenset[int]) -> str:
    return " or ".join(str(value) for value in sorted(values))
