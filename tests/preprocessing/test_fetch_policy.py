"""Which URLs and addresses a policy lets through, and what operators open by naming a domain."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from common.contract.errors import MediaForbidden
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
def test_a_domain_narrows_to_its_hosts(domain: str, allowed: list[str], refused: list[str]) -> None:
    narrowed = policy(domain)
    for host in allowed:
        narrowed.check_url(parse_url(f"http://{host}/"))
    for host in refused:
        with pytest.raises(MediaForbidden, match="--allow-media-domain does not allow"):
            narrowed.check_url(parse_url(f"http://{host}/"))


def test_without_domains_every_host_is_asked_and_with_two_both_are() -> None:
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


def test_a_network_is_opened_to_the_domain_it_stands_beside_and_to_no_other() -> None:
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
def test_one_address_that_may_not_be_reached_spoils_all(addresses: list[str]) -> None:
    assert not admits(policy(), "example.org", *addresses)


def test_a_host_without_addresses_is_not_admitted() -> None:
    assert not admits(policy("*=0.0.0.0/0"), "example.org")


@pytest.mark.parametrize(
    "text",
    ["", "*.", "=10.0.0.0/8", "minio=", "minio=10.0.0.1/8", "minio=corp", "*=*", "127.1", "*example.org", "a.*.org"],
)
def test_what_is_neither_a_domain_nor_a_network_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        AllowedDomain.parse(text)
