"""Addresses that services listen on: host:port, or unix:/path."""

from __future__ import annotations

from ipaddress import ip_address

from gridsieve.common.contract.errors import StartupError


def is_unix(address: str) -> bool:
    """Whether the address names unix sockets."""
    return address.startswith(("unix:", "unix-abstract:"))


def check_address(name: str, address: str) -> None:
    """Raises StartupError, which begins with `name`, unless the address is host:port or unix:/path."""
    if is_unix(address):
        return
    if address.startswith(("http://", "https://")):
        raise StartupError(f"{name} {address}: must be host:port without http:// or https://")
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise StartupError(f"{name} {address}: must end with a port from 1 to 65535, such as 127.0.0.1:50053")
    if not host:
        raise StartupError(
            f"{name} {address}: must begin with a host, such as 127.0.0.1, or 0.0.0.0 for all interfaces"
        )


def is_local(address: str) -> bool:
    """Whether traffic to the address stays on this machine."""
    if is_unix(address):
        return True
    hosts = [each.removeprefix("dns:///").rpartition(":")[0].strip("[]") for each in address.split(",")]
    return all(host == "localhost" or _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
