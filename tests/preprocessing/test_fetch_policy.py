"""A policy decides about URLs, hosts and addresses, by domains that operators name and by IANA's public addresses."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from gridsieve.common.contract.errors import MediaForbidden
from gridsieve.services.preprocessing.fetch.addresses import is_public
from gridsieve.services.preprocessing.fetch.policy import AllowedDomain, FetchPolicy
from gridsieve.services.preprocessing.fetch.urls import parse_host, parse_url


def policy(*domains: str) -> FetchPolicy:
    return FetchPolicy(domains=tuple(AllowedDomain.parse(domain) for domain in domains))


def admits(allowed: FetchPolicy, host: str, *addresses: str) -> bool:
    return allowed.admits(parse_host(host), [ip_address(address) for address in addresses])


@pytest.mark.parametrize(
    ("domains", "allowed", "refused"),
    [
        ("", "example.org 8.8.8.8", ""),
        ("*", "example.org 8.8.8.8 [2606::1]", ""),
        ("example.org *.example.com", "example.org a.example.com", "example.com a.example.org"),
        ("Example.ORG.", "example.org EXAMPLE.org.", "a.example.org example.org.evil notexample.org org"),
        ("*.example.org", "a.example.org b.a.example.org", "example.org notexample.org a.example.com"),
        (".example.org", "a.example.org", "example.org notexample.org"),
        ("8.8.8.8", "8.8.8.8", "8.8.8.9 dns.google"),
        ("[2606:0::1]", "[2606::1]", "[2606::2]"),
    ],
)
def test_domains_allow_only_their_hosts(domains: str, allowed: str, refused: str) -> None:
    narrowed = policy(*domains.split())
    for host in allowed.split():
        narrowed.check_url(parse_url(f"http://{host}/"))
    for host in refused.split():
        with pytest.raises(MediaForbidden, match="--allow-media-domain does not allow"):
            narrowed.check_url(parse_url(f"http://{host}/"))


def test_schemes_and_ports_are_those_of_the_policy() -> None:
    narrow = FetchPolicy(schemes=frozenset({"https"}), ports=frozenset({80, 443, 8443}))
    narrow.check_url(parse_url("https://example.org:8443/"))
    with pytest.raises(MediaForbidden, match="must start with https, got 'http'"):
        narrow.check_url(parse_url("http://example.org/"))
    with pytest.raises(MediaForbidden, match="must have port 80 or 443 or 8443, got 81"):
        narrow.check_url(parse_url("https://example.org:81/"))
    with pytest.raises(MediaForbidden, match="--fetch-schemes is empty"):
        FetchPolicy(schemes=frozenset()).check_url(parse_url("https://example.org/"))


def test_a_private_network_is_opened_only_to_the_domain_that_names_it() -> None:
    opened = policy("minio=10.20.0.0/16", "*.corp.example=fd00::7", "plain.example", "10.0.0.1", "*")
    assert admits(opened, "minio", "10.20.255.255", "8.8.8.8")
    assert admits(opened, "a.corp.example", "fd00::7")
    for host, address in (
        ("minio", "10.21.0.0"),
        ("minio", "::ffff:10.20.0.1"),
        ("example.org", "10.20.0.1"),
        ("plain.example", "10.20.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("corp.example", "fd00::7"),
    ):
        assert not admits(opened, host, address), (host, address)


@pytest.mark.parametrize("text", ["", "*.", "=10.0.0.0/8", "minio=", "minio=10.0.0.1/8", "*=*", "127.1", "a.*.org"])
def test_a_malformed_domain_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        AllowedDomain.parse(text)


# The first and last address of each network of IANA's special-purpose registries, and of clouds' metadata servers.
SPECIAL = """
    0.0.0.0 0.255.255.255 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.0 127.255.255.255 168.63.129.16
    169.254.0.0 169.254.169.254 169.254.255.255 172.16.0.0 172.31.255.255 192.0.0.0 192.0.0.255 192.0.2.0 192.0.2.255
    192.88.99.0 192.88.99.255 192.168.0.0 192.168.255.255 198.18.0.0 198.19.255.255 198.51.100.0 198.51.100.255
    203.0.113.0 203.0.113.255 224.0.0.0 239.255.255.255 240.0.0.0 255.255.255.255
    :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:7f00:1 64:ff9b::7f00:1 64:ff9b:1::a00:1 100::1
    1fff:ffff::1 2001:: 2001:1ff:ffff::1 2001:db8::1 2002:: 2002:808:808::1 2002:ffff:ffff::1 3fff:: 3fff:fff:ffff::1
    4000::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1
"""
# Their neighbours, and others.
PUBLIC = """
    1.0.0.0 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 168.63.129.15
    168.63.129.17 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 191.255.255.255 192.0.1.0 192.0.3.0
    192.88.98.255 192.88.100.0 192.167.255.255 192.169.0.0 198.17.255.255 198.20.0.0 198.51.99.255 198.51.101.0
    203.0.112.255 203.0.114.0 223.255.255.255
    2000::1 2001:200::1 2001:db7::1 2001:db9::1 2003::1 2606:4700::1111 2a00:1450:4001::200e 3ffe::1 3fff:1000::1
"""


def test_only_addresses_without_a_special_purpose_are_public() -> None:
    assert [each for each in SPECIAL.split() if is_public(ip_address(each))] == []
    assert [each for each in PUBLIC.split() if not is_public(ip_address(each))] == []
