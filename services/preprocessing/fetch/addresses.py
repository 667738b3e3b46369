"""Which addresses are public: assigned to somebody on the Internet, and not to a special purpose.

Written out, since `ipaddress`'s own properties changed between patch releases of Python. Everything that carries an
IPv4 address inside an IPv6 one (mapped, compatible, NAT64, 6to4, Teredo) is refused whole, whatever it carries. What
no table can know: a NAT64 prefix of the operator's own, which lies among public addresses.

Source: IANA's special-purpose address registries for IPv4 and IPv6, and what clouds serve their metadata on.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TypeAlias

IPAddress: TypeAlias = IPv4Address | IPv6Address
IPNetwork: TypeAlias = IPv4Network | IPv6Network

_SPECIAL_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and Alibaba's metadata
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's host, a public address that is none
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

# Outside it lie loopback, mapped, compatible and NAT64 addresses, unique local (and the metadata of AWS and Google in
# them), link-local, site-local, multicast and all that is reserved.
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
    """Whether it is an address of somebody on the Internet."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _ASSIGNED_V6 and not any(address in network for network in _SPECIAL_V6)
