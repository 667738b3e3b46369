"""Whose pages may call the gateway, by the headers `Origin` (whose page asks) and `Host` (the name that it asked for).

A page can have its own name resolved to the gateway's address (DNS rebinding): then both headers name the page's site.
Browsers send `Origin` with all that changes something, as do programs that show pages of their own (`app://…`).
Starlette's TrustedHostMiddleware has no pattern for loopback addresses, and does not look at `Origin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from gridsieve.common.address import is_local, is_unix
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.gateway.http.errors import ForbiddenOrigin


class Origins:
    """allowed: --cors-origins: whose pages may call the gateway beside its own, and by whose hosts; * for all.

    listen: --listen. On loopback the gateway has the names of loopback alone, and those of `allowed`. Elsewhere it also
    answers to every address, and to every name if neither `allowed` nor `listen` gives one.
    Raises StartupError for what is not an origin.
    """

    def __init__(self, allowed: Sequence[str], listen: str) -> None:
        for origin in {*allowed} - {"*", "null"}:
            if not _host_of(origin) or urlsplit(origin).path:
                raise StartupError(f"--cors-origins {origin} is not an origin, such as https://app.example.org")
        self._allowed = frozenset(allowed)
        self._listens_on = _host_of(f"//{listen}")
        self._names = {_host_of(origin) for origin in allowed} - {""}
        if self._listens_on and not _address_of(self._listens_on):
            self._names.add(self._listens_on)
        self._on_loopback = is_local(listen) and not is_unix(listen)

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ForbiddenOrigin for a request that a page of another site makes, or may make."""
        if "*" in self._allowed:
            return
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._has_name(_host_of(f"//{host}")):
            text = f"this gateway does not answer to the name {host[:80]!r}; if it has it, see --cors-origins"
            raise ForbiddenOrigin(text)
        if origin is not None and origin not in self._allowed and origin.partition("://")[2] != host:
            raise ForbiddenOrigin(f"pages of {origin[:80]} may not call this gateway, see --cors-origins")

    def _has_name(self, name: str) -> bool:
        if name == self._listens_on or name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        if address := _address_of(name):
            return address.is_loopback or not self._on_loopback
        return not self._on_loopback and not self._names


def _address_of(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _host_of(url: str) -> str:
    """Its host in lower case, an IPv6 address without brackets; empty where it has none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:  # half of the brackets, for example
        return ""
