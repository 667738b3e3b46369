"""Parses http(s) and rtsp(s) URLs strictly, so that no two parsers can read one URL differently, and file URLs.

A URL follows RFC 3986 in ASCII: other hosts must be in punycode, other paths percent-encoded. Stricter than the RFC
where parsers differ: a user name for streams alone, no backslash, no empty port, no escapes in the host, IPv4 addresses
only as four decimal numbers. Error texts repeat only the scheme, host and port of a URL, because user names, paths and
queries may be secret or carry signatures. It knows neither the fetch policy nor DNS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import unquote_to_bytes

from gridsieve.common.contract.errors import InvalidRequest, MediaForbidden
from gridsieve.services.preprocessing.fetch.addresses import IPAddress
from gridsieve.services.preprocessing.fetch.login import Login

MAX_URL_CHARACTERS = 8192
MAX_HOST_CHARACTERS = 253

_DEFAULT_PORTS = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
# Of URLs that name a file, and of those that name a stream.
FILE_SCHEMES, STREAM_SCHEMES = ("http", "https"), ("http", "https", "rtsp", "rtsps")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AFTER_SCHEME = re.compile(
    r"//(?:(?P<login>[^\[\]/?#@]*)@)?(?P<host>\[[^\]/?#@]*\]|[^\[\]:/?#@]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:#.*)?"
)
_PRINTABLE_ASCII = re.compile(r"[!-\[\]-~]*")  # neither space nor backslash
_NAME = re.compile(r"(?:(?!-)[a-z0-9_-]{1,63}(?<!-)\.)*(?!-)[a-z0-9_-]{1,63}(?<!-)")
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")
_FILE = re.compile(r"file://(?P<host>[^/?#]*)(?P<path>/[^?#]*)(?:\?[^#]*)?(?:#.*)?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Host:
    """A host name in lower case without a final dot, or an address in its shortest form without brackets."""

    name: str
    address: IPAddress | None


@dataclass(frozen=True, slots=True)
class Url:
    """A URL without its fragment. target: path and query as given, at least "/". login: which its text leaves out."""

    scheme: str
    host: Host
    port: int
    target: str
    login: Login | None = None

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        name = f"[{self.host.name}]" if isinstance(self.host.address, IPv6Address) else self.host.name
        return name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str, schemes: Sequence[str] = FILE_SCHEMES) -> Url:
    """Parses a URL. Raises InvalidRequest for a malformed or ambiguous one, MediaForbidden for other schemes."""
    begins = " or ".join(f"{scheme}://" for scheme in schemes)
    if len(text) > MAX_URL_CHARACTERS:
        raise InvalidRequest(f"must have at most {MAX_URL_CHARACTERS} characters, got {len(text)}")
    if not _PRINTABLE_ASCII.fullmatch(text):
        raise InvalidRequest("must be printable ASCII without spaces and backslashes")
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise InvalidRequest(f"must start with {begins}")
    name = scheme[1].lower()
    if name not in schemes:
        raise MediaForbidden(f"must start with {begins}, got {name[:16]!r}")
    parts = _AFTER_SCHEME.fullmatch(text, scheme.end())
    takes_login = tuple(schemes) == STREAM_SCHEMES
    if parts is None or (parts["login"] is not None and not takes_login):
        form, told = ("[user:password@]", ", percent-encoded") if takes_login else ("", ", without a user name")
        raise InvalidRequest(f"must be {name}://{form}host[:port][/path]{told}")
    port = int(parts["port"]) if parts["port"] else _DEFAULT_PORTS[name]
    target = (parts["path"] or "/") + (parts["query"] or "")
    login = Login.parse(parts["login"]) if parts["login"] else None
    return Url(name, parse_host(parts["host"]), port, target, login)


def parse_host(text: str) -> Host:
    """Parses the host of a URL. Raises InvalidRequest for anything but a name or an address in plain form."""
    name = text.lower().removesuffix(".")
    try:
        if name.startswith("["):
            return _address_host(IPv6Address(name.removeprefix("[").removesuffix("]")))
        if _ENDS_IN_A_NUMBER.fullmatch(name):
            return _address_host(IPv4Address(name))
    except ValueError as error:
        raise InvalidRequest(
            f"has a host that is not an address in plain form: {text[:MAX_HOST_CHARACTERS]!r}"
        ) from error
    if len(name) > MAX_HOST_CHARACTERS or not _NAME.fullmatch(name):
        raise InvalidRequest(f"has a host that is not a valid name: {text[:MAX_HOST_CHARACTERS]!r}")
    return Host(name, None)


def _address_host(address: IPAddress) -> Host:
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        raise ValueError("zones are local to a machine")
    return Host(str(address), address)


def file_path(url: str) -> str:
    """The path that a file URL names, without percent escapes: file:///clip.mp4 or file://localhost/clip.mp4.

    Source: RFC 8089. Raises InvalidRequest for a malformed URL, MediaForbidden for one of another host.
    """
    parts = _FILE.fullmatch(url)
    if parts is None:
        raise InvalidRequest("must be file:///path")
    if parts["host"].lower() not in ("", "localhost"):
        raise MediaForbidden(f"must name no host, got {parts['host'][:MAX_HOST_CHARACTERS]!r}: file:///path")
    return os.fsdecode(unquote_to_bytes(parts["path"]))
