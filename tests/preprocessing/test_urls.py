"""URLs are parsed unambiguously, disguised hosts are refused, and file URLs name paths of this host."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridsieve.common.contract.errors import InvalidRequest, MediaForbidden
from gridsieve.services.preprocessing.fetch.urls import MAX_URL_CHARACTERS, file_path, parse_url


@pytest.mark.parametrize(
    ("text", "host", "port", "target", "authority"),
    [
        ("HTTPS://Example.ORG/a/B?c=%2F&d#e", "example.org", 443, "/a/B?c=%2F&d", "example.org"),
        ("http://example.org.?x", "example.org", 80, "/?x", "example.org"),
        ("http://example.org:8080/a//../b", "example.org", 8080, "/a//../b", "example.org:8080"),
        ("https://example.org:80", "example.org", 80, "/", "example.org:80"),
        ("https://a_b.xn--bcher-kva.example:443/", "a_b.xn--bcher-kva.example", 443, "/", "a_b.xn--bcher-kva.example"),
        ("http://localhost/@x:y", "localhost", 80, "/@x:y", "localhost"),
        ("http://127.0.0.1./", "127.0.0.1", 80, "/", "127.0.0.1"),
        ("http://[2001:DB8:0::1]:8080/", "2001:db8::1", 8080, "/", "[2001:db8::1]:8080"),
        ("http://1.example/", "1.example", 80, "/", "1.example"),
    ],
)
def test_a_url_is_parsed_as_in_rfc_3986(text: str, host: str, port: int, target: str, authority: str) -> None:
    url = parse_url(text)
    assert (url.host.name, url.port, url.target, url.authority) == (host, port, target, authority)
    assert (url.host.address is not None) == (host in ("127.0.0.1", "2001:db8::1"))


DISGUISED = [
    "2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "0x7f.0.0.1", "127.0.0.01",  # decimal, hex, octal
    "127.1", "127.0.0.1..", "127.0.0.0x", "1.2.3.4.5", "256.0.0.1",  # short, long, out of range
    "%31%32%37.0.0.1", "127.0.0.1%2f.example.org",  # escapes
    "１２７.0.0.1", "127。0。0。1", "bücher.example",  # normalised by IDNA
    "user@127.0.0.1", "user:password@example.org", "example.org\\@127.0.0.1", "example.org:80@127.0.0.1",  # user names
    "[fe80::1%25eth0]", "[fe80::1%eth0]",  # zones
    "[::1", "::1", "[127.0.0.1]", "[v1.fe80::a]", "[::ffff:127.1]", "[::1]evil.example",
    "example.org:", "example.org:+80", "example.org:0x50", "example.org:８０", "example.org:800000",  # ports
    "", ".", ".example.org", "example..org", "-example.org", "example-.org", "a" * 64 + ".org", "a." * 127 + "org",
    "ex ample.org", "ex\0ample.org", "example.org\r\nHost: 127.0.0.1", "ex*mple.org",
]  # fmt: skip


@pytest.mark.parametrize("host", DISGUISED)
def test_a_disguised_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(f"http://{host}/clip.mp4")


MALFORMED = [
    "clip.mp4", "//example.org/clip.mp4", "://example.org", "http:example.org", "http:/example.org", "http://?x",
    "http:\\\\example.org", "ht\ttp://example.org", " http://example.org", "http://example.org/a b",
    "http://example.org/ä",
]  # fmt: skip


@pytest.mark.parametrize("text", MALFORMED)
def test_anything_but_an_absolute_ascii_url_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(text)


@pytest.mark.parametrize("text", ["file:///etc/passwd", "gopher://127.0.0.1:25/_x", "javascript:x", "ws://a"])
def test_other_schemes_are_forbidden(text: str) -> None:
    with pytest.raises(MediaForbidden, match="must start with http:// or https://"):
        parse_url(text)


def test_a_long_url_is_refused() -> None:
    longest = "http://example.org/".ljust(MAX_URL_CHARACTERS, "a")
    assert parse_url(longest)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_URL_CHARACTERS} characters, got {MAX_URL_CHARACTERS + 1}"):
        parse_url(longest + "a")


@pytest.mark.parametrize("text", ["http://user:secret@example.org/", "http://1/?secret", "http://a/\\secret"])
def test_errors_repeat_neither_credentials_nor_paths(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_url(text)
    assert "secret" not in str(refused.value)


@given(st.text(alphabet="htps:/.@[]%#?\\01279afx-é ", max_size=40).map("http://".__add__))
def test_a_parsed_url_parses_to_itself(text: str) -> None:
    try:
        url = parse_url(text)
    except InvalidRequest:
        return
    assert parse_url(str(url)) == url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///clips/a%20b%23%C3%A9.mp4", "/clips/a b#é.mp4"),
        ("FILE://LocalHost/a+b.mp4?x#y", "/a+b.mp4"),
        ("file:///clips/raw é.mp4", "/clips/raw é.mp4"),
    ],
)
def test_a_file_url_names_a_path(url: str, path: str) -> None:
    assert file_path(url) == path


@pytest.mark.parametrize(
    ("url", "error"),
    [("file://host/a.mp4", MediaForbidden), ("file:a.mp4", InvalidRequest), ("file://", InvalidRequest)],
)
def test_a_file_url_of_another_host_or_without_a_path_is_refused(url: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="file:///path"):
        file_path(url)
