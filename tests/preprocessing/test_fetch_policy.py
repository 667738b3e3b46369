"""A policy decides about URLs, hosts and addresses, by domains that operators name and by IANA's public addresses."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.errors import MediaForbidden
from services.preprocessing.fetch.addresses import is_public
from services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from services.preprocessing.fetch.urls import parse_host, parse_url


def policy(*domains: str) -> FetchPolicy:
    return FetchPolicy(domains=tuple(AllowedDomain.parse(domain) for domain in domains))


def admits(allowed: FetchPolicy, host: str, *addresses: str) -> bool:
    return allowed.admits(parse_host(host), [ip_address(address) for address in addresses])


@pytest.mark.parametrize(
    ("domain", "allowed", "refused"),
    [
        (
            "example.org",
            ["example.org", "EXAMPLE.org."],
            ["a.example.org", "example.org.evil", "notexample.org", "org"],
        ),
        ("*.example.org", ["a.example.org", "b.a.example.org"], ["example.org", "notexample.org", "a.example.com"]),
        (".example.org", ["a.example.org"], ["example.org", "notexample.org"]),
        ("*", ["example.org", "8.8.8.8", "[2606::1]"], []),
        ("8.8.8.8", ["8.8.8.8"], ["8.8.8.9", "dns.google"]),
        ("[2606:0::1]", ["[2606::1]"], ["[2606::2]"]),
        ("Example.ORG.", ["example.org"], []),
    ],
)
def test_a_domain_allows_only_its_hosts(domain: str, allowed: list[str], refused: list[str]) -> None:
    narrowed = policy(domain)
    for host in allowed:
        narrowed.check_url(parse_url(f"http://{host}/"))
    for host in refused:
        with pytest.raises(MediaForbidden, match="--allow-media-domain does not allow"):
            narrowed.check_url(parse_url(f"http://{host}/"))


def test_without_domains_every_host_is_allowed_and_with_two_both_are() -> None:
    policy().check_url(parse_url("http://example.org/"))
    both = policy("example.org", "*.example.com")
    both.check_url(parse_url("http://example.org/"))
    both.check_url(parse_url("http://a.example.com/"))


def test_schemes_and_ports_are_those_of_the_policy() -> None:
    narrow = FetchPolicy(schemes=frozenset({"https"}), ports=frozenset({80, 443, 8443}))
    narrow.check_url(parse_url("https://example.org:8443/"))
    with pytest.raises(MediaForbidden, match="must start with https, got 'http'"):
        narrow.check_url(parse_url("http://example.org/"))
    with pytest.raises(MediaForbidden, match="must have port 80 or 443 or 8443, got 81"):
        narrow.check_url(parse_url("https://example.org:81/"))


def test_without_schemes_nothing_is_fetched() -> None:
    with pytest.raises(MediaForbidden, match="with no --fetch-schemes"):
        FetchPolicy(schemes=frozenset()).check_url(parse_url("https://example.org/"))


def test_a_name_alone_opens_no_private_network() -> None:
    assert admits(policy("example.org"), "example.org", "8.8.8.8")
    assert not admits(policy("example.org"), "example.org", "10.0.0.1")
    assert not admits(policy("10.0.0.1"), "10.0.0.1", "10.0.0.1")


def test_a_network_is_opened_only_to_its_domain() -> None:
    opened = policy("minio=10.20.0.0/16", "*.corp.example=fd00::7", "*")
    assert admits(opened, "minio", "10.20.255.255")
    assert admits(opened, "minio", "10.20.0.1", "8.8.8.8")
    assert not admits(opened, "minio", "10.21.0.0")
    assert not admits(opened, "minio", "169.254.169.254")
    assert not admits(opened, "minio", "::ffff:10.20.0.1")
    assert not admits(opened, "example.org", "10.20.0.1")
    assert admits(opened, "a.corp.example", "fd00::7")
    assert not admits(opened, "corp.example", "fd00::7")


@pytest.mark.parametrize("addresses", [["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"], ["2606::1", "fe80::1%2"]])
def test_one_forbidden_address_refuses_the_host(addresses: list[str]) -> None:
    assert not admits(policy(), "example.org", *addresses)


def test_a_host_without_addresses_is_refused() -> None:
    assert not admits(policy("*=0.0.0.0/0"), "example.org")


@pytest.mark.parametrize(
    "text",
    ["", "*.", "=10.0.0.0/8", "minio=", "minio=10.0.0.1/8", "minio=corp", "*=*", "127.1", "*example.org", "a.*.org"],
)
def test_a_malformed_domain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        AllowedDomain.parse(text)


# --- public addresses -----------------------------------------------------------------------------------------------

SPECIAL = {
    "unspecified": ("0.0.0.0", "0.255.255.255", "::"),
    "private": ("10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255"),
    "carrier-grade NAT": ("100.64.0.1", "100.127.255.255"),
    "loopback": ("127.0.0.1", "127.255.255.254", "::1"),
    "link-local": ("169.254.0.1", "169.254.255.255", "fe80::1", "fe80::1%eth0", "febf::1"),
    "site-local": ("fec0::1", "feff::1"),
    "unique local": ("fc00::1", "fdff:ffff::1"),
    "metadata": ("169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192", "168.63.129.16"),
    "metadata over IPv6": ("fd00:ec2::254", "fd20:ce::254", "fe80::a9fe:a9fe"),
    "protocol assignments": ("192.0.0.1", "192.0.0.171", "2001:1::1", "2001:1ff:ffff::1"),
    "documentation": ("192.0.2.1", "198.51.100.1", "203.0.113.255", "2001:db8::1", "3fff::1", "3fff:fff::1"),
    "benchmarking": ("198.18.0.1", "198.19.255.255", "2001:2::1"),
    "multicast": ("224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"),
    "reserved": ("240.0.0.1", "255.255.255.254", "4000::1", "8000::1", "5f00::1"),
    "broadcast": ("255.255.255.255",),
    "discard-only": ("100::1",),
    "mapped": ("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:8.8.8.8"),
    "compatible": ("::127.0.0.1", "::10.0.0.1", "::8.8.8.8"),
    "translated": ("::ffff:0:7f00:1",),
    "NAT64": ("64:ff9b::127.0.0.1", "64:ff9b::8.8.8.8", "64:ff9b:1::10.0.0.1"),
    "6to4": ("2002:7f00:1::1", "2002:808:808::1", "192.88.99.1"),
    "Teredo": ("2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
}
PUBLIC = """
    8.8.8.8 1.1.1.1 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.1 172.15.255.255
    172.32.0.0 168.63.129.15 168.63.129.17 192.0.1.1 198.17.255.255 198.20.0.0 223.255.255.255 2001:200::1 2003::1
    2606:4700::1111 2a00:1450:4001::200e 3fff:1000::1
"""

# In IANA's registries, but not in every Python's `ipaddress`; and Azure's host, which is in neither.
UNKNOWN_TO_IPADDRESS = [
    ip_network(network)
    for network in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16", "2001::/23", "3fff::/20", "64:ff9b:1::/48")
]


@pytest.mark.parametrize("kind", SPECIAL)
def test_an_address_with_a_special_purpose_is_not_public(kind: str) -> None:
    assert [each for each in SPECIAL[kind] if is_public(ip_address(each))] == []


def test_other_addresses_are_public() -> None:
    assert [each for each in PUBLIC.split() if not is_public(ip_address(each))] == []


def edges(networks: list[str]) -> list[IPv4Address | IPv6Address]:
    """The first and last address of each network, and those just outside."""
    found = []
    for network in map(ip_network, networks):
        first, last = int(network[0]), int(network[-1])
        beside = [value for value in (first - 1, first, last, last + 1) if 0 <= value < 1 << network.max_prefixlen]
        found += [type(network[0])(value) for value in beside]
    return found


NETWORKS = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
    192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 ::/96 ::ffff:0:0/96
    64:ff9b::/96 100::/64 2000::/3 2001::/23 2001:db8::/32 2002::/16 3fff::/20 fc00::/7 fe80::/10 fec0::/10 ff00::/8
"""


@given(
    st.one_of(st.ip_addresses(), st.integers(0, 2**32 - 1).map(IPv4Address), st.sampled_from(edges(NETWORKS.split())))
)
def test_is_public_agrees_with_ipaddress_where_that_knows_the_registries(address: IPv4Address | IPv6Address) -> None:
    expected = address.is_global and not (
        address.is_private
        or address.is_multicast
        or address.is_reserved
        or address.is_link_local
        or address.is_loopback
        or address.is_unspecified
        or any(address in network for network in UNKNOWN_TO_IPADDRESS)
    )
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or address.teredo
        expected = expected and not (address.is_site_local or embedded)
    assert is_public(address) == expected
