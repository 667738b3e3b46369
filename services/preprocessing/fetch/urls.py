"""URLs to parts, without disguises: what is read here is what is dialled, and nothing is read in two ways.

A URL is what RFC 3986 calls one, in ASCII: hosts beyond it are written in punycode, paths percent-encoded. Stricter
than the RFC where parsers differ: no user name, no backslash, no empty port, no escapes in the host, and IPv4 addresses
in four decimal numbers alone. It knows neither what may be reached nor DNS. Errors repeat no more of a URL than its
scheme, host and port, since paths and queries carry signatures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from common.contract.errors import InvalidRequest, MediaForbidden
from services.preprocessing.fetch.addresses import IPAddress

MAX_URL_CHARACTERS = 8192
MAX_HOST_CHARACTERS = 253

_DEFAULT_PORTS = {"http": 80, "https": 443}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_AFTER_SCHEME = re.compile(
    r"//(?P<host>\[[^\]/?#@]*\]|[^\[\]:/?#@]+)(?::(?P<port>[0-9]{1,5}))?(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:#.*)?"
)
_PRINTABLE_ASCII = re.compile(r"[!-\[\]-~]*")  # neither space nor backslash
_NAME = re.compile(r"(?:(?!-)[a-z0-9_-]{1,63}(?<!-)\.)*(?!-)[a-z0-9_-]{1,63}(?<!-)")
_ENDS_IN_A_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")


@dataclass(frozen=True, slots=True)
class Host:
    """A name in lower case without a final dot, or an address in its shortest form without brackets."""

    name: str
    address: IPAddress | None


@dataclass(frozen=True, slots=True)
class Url:
    """An http or https URL. target: path and query as given, at least "/"; what follows `#` is gone."""

    scheme: str
    host: Host
    port: int
    target: str

    @property
    def authority(self) -> str:
        """What the Host header says."""
        name = f"[{self.host.name}]" if isinstance(self.host.address, IPv6Address) else self.host.name
        return name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str) -> Url:
    """Raises InvalidRequest for what is no URL or a disguised one, MediaForbidden for a scheme but http and https."""
    if len(text) > MAX_URL_CHARACTERS:
        raise InvalidRequest(f"must have at most {MAX_URL_CHARACTERS} characters, got {len(text)}")
    if not _PRINTABLE_ASCII.fullmatch(text):
        raise InvalidRequest("must be printable ASCII without spaces and backslashes")
    scheme = _SCHEME.match(text)
    if scheme is None:
        raise InvalidRequest("must start with http:// or https://")
    name = scheme[1].lower()
    if name not in _DEFAULT_PORTS:
        raise MediaForbidden(f"must start with http:// or https://, got {name[:16]!r}")
    parts = _AFTER_SCHEME.fullmatch(text, scheme.end())
    if parts is None:
        raise InvalidRequest(f"must be {name}://host[:port][/path], without a user name")
    port = int(parts["port"]) if parts["port"] else _DEFAULT_PORTS[name]
    return Url(name, parse_host(parts["host"]), port, (parts["path"] or "/") + (parts["query"] or ""))


def parse_host(text: str) -> Host:
    """A host as it stands in a URL. Raises InvalidRequest for what is neither a name nor an address in plain form."""
    name = text.lower().removesuffix(".")
    try:
        if name.startswith("["):
            return _address_host(IPv6Address(name.removeprefix("[").removesuffix("]")))
        if _ENDS_IN_A_NUMBER.fullmatch(name):
            return _address_host(IPv4Address(name))
    except ValueError as error:
        raise InvalidRequest(f"has a host that is no address in plain form: {text[:MAX_HOST_CHARACTERS]!r}") from error
    if len(name) > MAX_HOST_CHARACTERS or not _NAME.fullmatch(name):
        raise InvalidRequest(f"has a host that is no name: {text[:MAX_HOST_CHARACTERS]!r}")
    return Host(name, None)


def _address_host(address: IPAddress) -> Host:
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        raise ValueError("a zone is this machine's own affair")
    return Host(str(address), address)
