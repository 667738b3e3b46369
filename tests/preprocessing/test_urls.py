"""URLs are parsed unambiguously, disguised hosts are refused, and data URIs follow RFC 2397."""

from __future__ import annotations

import base64
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.contract.errors import InvalidRequest, MediaForbidden
from services.preprocessing.fetch.urls import MAX_URL_CHARACTERS, decode_data_uri, parse_url


@pytest.mark.parametrize(
    ("text", "host", "port", "target", "authority"),
    [
        ("http://example.org", "example.org", 80, "/", "example.org"),
        ("HTTPS://Example.ORG/a/B?c=%2F&d#e", "example.org", 443, "/a/B?c=%2F&d", "example.org"),
        ("http://example.org?x", "example.org", 80, "/?x", "example.org"),
        ("http://example.org./a", "example.org", 80, "/a", "example.org"),
        ("http://example.org:8080/a//../b", "example.org", 8080, "/a//../b", "example.org:8080"),
        ("https://example.org:80/", "example.org", 80, "/", "example.org:80"),
        ("https://a_b.xn--bcher-kva.example:443/", "a_b.xn--bcher-kva.example", 443, "/", "a_b.xn--bcher-kva.example"),
        ("http://localhost/@x:y", "localhost", 80, "/@x:y", "localhost"),
        ("http://8.8.8.8/", "8.8.8.8", 80, "/", "8.8.8.8"),
        ("http://127.0.0.1./", "127.0.0.1", 80, "/", "127.0.0.1"),
        ("http://[2001:DB8:0::1]:8080/", "2001:db8::1", 8080, "/", "[2001:db8::1]:8080"),
        ("http://1.example/", "1.example", 80, "/", "1.example"),
    ],
)
def test_a_url_is_parsed_as_in_rfc_3986(text: str, host: str, port: int, target: str, authority: str) -> None:
    url = parse_url(text)
    assert (url.host.name, url.port, url.target, url.authority) == (host, port, target, authority)
    assert (url.host.address is None) == (host[0].isalpha() or host == "1.example")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[0:0:0:0:0:ffff:7f00:1]"])
def test_an_address_is_recognised(host: str) -> None:
    assert parse_url(f"http://{host}/").host.address is not None


DISGUISED = [
    "2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "0x7f.0.0.1", "127.0.0.01",  # decimal, hex, octal
    "127.1", "127.0.1", "127.0.0.1..", "127.0.0.0x", "1.2.3.4.5", "256.0.0.1",  # short, long, out of range
    "%31%32%37.0.0.1", "127.0.0.1%2f.example.org",  # escapes
    "１２７.0.0.1", "127。0。0。1", "①②⑦.0.0.1", "ⓔxample.org", "bücher.example",  # normalised by IDNA
    "user@127.0.0.1", "example.org@127.0.0.1", "user:password@example.org", "example.org\\@127.0.0.1",  # user names
    "example.org:80@127.0.0.1",
    "[fe80::1%25eth0]", "[fe80::1%eth0]",  # zones
    "[::1", "::1", "[127.0.0.1]", "[v1.fe80::a]", "[::ffff:127.1]", "[::ffff:0177.0.0.1]", "[::1]evil.example",
    "example.org:", "example.org:+80", "example.org:0x50", "example.org:８０", "example.org:800000",  # ports
    "", ".", ".example.org", "example..org", "-example.org", "example-.org", "a" * 64 + ".org", "a." * 127 + "org",
    "ex ample.org", "ex\tample.org", "ex\nample.org", "ex\0ample.org", "example.org\r\nHost: 127.0.0.1", "ex*mple.org",
]  # fmt: skip


@pytest.mark.parametrize("host", DISGUISED)
def test_a_disguised_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(f"http://{host}/clip.mp4")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "clip.mp4",
        "/clip.mp4",
        "//example.org/clip.mp4",
        "://example.org",
        "http:example.org",
        "http:/example.org",
        "http:///clip.mp4",
        "http://?x",
        "http://#x",
        "http:\\\\example.org",
        "ht\ttp://example.org",
        " http://example.org",
        "http://example.org ",
        "http://example.org/a b",
        "http://example.org/ä",
        "http://example.org/\u2028",
    ],
)
def test_anything_but_an_absolute_ascii_url_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_url(text)


@pytest.mark.parametrize(
    "text",
    ["file:///etc/passwd", "ftp://example.org/a", "gopher://127.0.0.1:25/_x", "javascript:x", "unix:/run/x", "ws://a"],
)
def test_other_schemes_are_forbidden(text: str) -> None:
    with pytest.raises(MediaForbidden, match="must start with http:// or https://"):
        parse_url(text)


def test_a_long_url_is_refused() -> None:
    start = "http://example.org/"
    assert parse_url(start + "a" * (MAX_URL_CHARACTERS - len(start)))
    with pytest.raises(InvalidRequest, match=f"at most {MAX_URL_CHARACTERS} characters, got {MAX_URL_CHARACTERS + 1}"):
        parse_url(start + "a" * (MAX_URL_CHARACTERS - len(start) + 1))


@pytest.mark.parametrize(
    "text", ["http://user:secret@example.org/", "http://2130706433/?secret", "http://a..b/secret", "http://a/\\secret"]
)
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


# --- data URIs ------------------------------------------------------------------------------------------------------


@given(st.binary())
@example(b"=3D%41=\n=")
def test_a_data_uri_decodes_to_the_encoded_bytes(data: bytes) -> None:
    encoded = base64.b64encode(data).decode()
    assert decode_data_uri(f"data:video/mp4;base64,{encoded}") == data
    assert decode_data_uri(f"data:;base64,{quote_from_bytes(encoded.encode(), safe='')}") == data
    assert decode_data_uri(f"data:video/mp4,{quote_from_bytes(data, safe='')}") == data
    assert decode_data_uri("data:," + "".join(f"%{byte:02x}" for byte in data)) == data


@pytest.mark.parametrize(
    ("uri", "data"),
    [
        ("data:,A%20brief%20note", b"A brief note"),
        ("DATA:text/plain;charset=US-ASCII;BASE64,QQ==", b"A"),
        ("data:;base64;x=y,QQ==", b"QQ=="),
        ("data:,a,b", b"a,b"),
        ("data:,a=41+_#fragment", b"a=41+_"),
        ("data:,", b""),
    ],
)
def test_a_data_uri_is_parsed_as_in_rfc_2397(uri: str, data: bytes) -> None:
    assert decode_data_uri(uri) == data


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("data:", "must be data:"),
        ("data:image/png;base64", "must be data:"),
        ("http://example.org/,", "must be data:"),
        ("data:,é", "in ASCII"),
        ("data:,%4", "two hexadecimal digits"),
        ("data:,%zz", "two hexadecimal digits"),
        ("data:;base64,%", "two hexadecimal digits"),
        ("data:;base64,QQ", "must be base64"),
        ("data:;base64,Q Q==", "must be base64"),
        ("data:;base64,QQ==QQ==", "must be base64"),
        ("data:;base64,Q-_=", "must be base64"),
    ],
)
def test_a_malformed_data_uri_is_refused(uri: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        decode_data_uri(uri)
