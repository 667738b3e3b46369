"""Addresses of host names, and which addresses are public: reachable on the Internet, without a special purpose.

The table of networks is written out because the properties of Python's `ipaddress` changed between patch releases.
IPv6 addresses that embed an IPv4 address (mapped, compatible, NAT64, 6to4, Teredo) are never public, whatever they
embed. One gap remains: a NAT64 prefix that the operator chose among public addresses.

Source: IANA's special-purpose address registries for IPv4 and IPv6, and the addresses of clouds' metadata servers.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from threading import Semaphore
from typing import TypeAlias

from gridsieve.common.contract.errors import Overloaded

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network

_SPECIAL_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and Alibaba's metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's platform services, on an address that is otherwise public
        "169.254.0.0/16",  # link-local, and most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, and Oracle's metadata
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)

# Outside this network: loopback, mapped, compatible and NAT64 addresses, unique local (with the metadata servers of AWS
# and Google), link-local, site-local, multicast and reserved ones.
_ASSIGNED_V6 = IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # Teredo, benchmarking, ORCHID and other protocols
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)


def is_public(address: IPAddress) -> bool:
    """Whether the address is a public one."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _ASSIGNED_V6 and not any(address in network for network in _SPECIAL_V6)


class SystemResolver:
    """Resolves up to `at_once` names at a time. A cancelled lookup keeps its thread until the system gives up."""

    def __init__(self, at_once: int) -> None:
        # Own threads: the event loop's are few, and silent name servers would block them for other work.
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="look-up")
        self._free = Semaphore(at_once)
        self._at_once = at_once

    async def look_up(self, host: str) -> Sequence[str]:
        """The host's addresses, in the order in which the system would dial them.

        Raises OSError for a name without any, Overloaded where `at_once` lookups are already running.
        """
        if not self._free.acquire(blocking=False):
            raise Overloaded(f"has a host whose name cannot be looked up now: {self._at_once} lookups are running")
        job = self._threads.submit(partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM))
        job.add_done_callback(lambda _: self._free.release())
        found = await asyncio.wrap_future(job)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
