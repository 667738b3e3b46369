"""What a channel trusts and what its calls show: authorities, a certificate, a token.

TLS is spoken on TCP alone: who may open a unix socket is a matter of the folder that it lies in.
It does not know what a listener takes (`common.security.certificates`, `common.security.tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from ipaddress import ip_address

import grpc

from common.contract.errors import StartupError
from common.security.certificates import KeyPair
from common.security.tokens import AUTHORIZATION_KEY


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a service is called.

    authorities: one of these must have issued the service's certificate, as PEM; None: no TLS.
    pair: shown to services that ask for a certificate.
    token: shown with every call, and to nobody else: it stands in no log and in no repr.
    plaintext_token: lets it go without TLS to other machines, where something else keeps the network private.
    """

    authorities: bytes | None = None
    pair: KeyPair | None = None
    token: str | None = field(default=None, repr=False)
    plaintext_token: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries."""
        return ((AUTHORIZATION_KEY, f"Bearer {self.token}"),) if self.token is not None else ()

    def for_channel(self, address: str) -> grpc.ChannelCredentials | None:
        """TLS for a channel to this address; None: plain text.

        Raises StartupError where that would show the token, and for a list: a certificate is held to a name.
        """
        if self.authorities is None or is_unix(address):
            self._check_private(address)
            return None
        if "," in address:
            raise StartupError(f"by TLS, replicas are the addresses of one name, not a list, got {address}")
        key, chain = (self.pair.key, self.pair.chain) if self.pair else (None, None)
        return grpc.ssl_channel_credentials(self.authorities, key, chain)

    def _check_private(self, address: str) -> None:
        if self.token is not None and not self.plaintext_token and not is_local(address):
            raise StartupError(
                f"the token would go to {address} in plain text: name the authorities of its certificate for TLS "
                "(--tls-ca, a service's --upstream-tls-ca), or say --allow-plaintext-token where the network is private"
            )


NO_CREDENTIALS = Credentials()


def is_unix(address: str) -> bool:
    """Whether it names sockets in the file system, and no network."""
    return address.startswith(("unix:", "unix-abstract:"))


def is_local(address: str) -> bool:
    """Whether nothing that is sent there leaves this machine."""
    if is_unix(address):
        return True
    hosts = [each.removeprefix("dns:///").rpartition(":")[0].strip("[]") for each in address.split(",")]
    return all(host == "localhost" or _is_loopback(host) for host in hosts)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
