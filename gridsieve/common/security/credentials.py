"""Credentials of a channel: trusted authorities, a client certificate and a bearer token.

Only TCP uses TLS: access to a unix socket is controlled by the permissions of its folder. What a listener accepts is
in `gridsieve.common.security.certificates` and `gridsieve.common.security.tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from gridsieve.common.address import is_local, is_unix
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.security.certificates import KeyPair
from gridsieve.common.security.tokens import AUTHORIZATION_KEY


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a service is called.

    authorities: PEM certificates, one of which must have issued the service's certificate; None: plain text.
    pair: client certificate for services that ask for one.
    token: sent with every call; kept out of logs and out of repr.
    plaintext_token: allows the token on plain-text connections to other machines, for networks that are private.
    """

    authorities: bytes | None = None
    pair: KeyPair | None = None
    token: str | None = field(default=None, repr=False)
    plaintext_token: bool = False

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return ((AUTHORIZATION_KEY, f"Bearer {self.token}"),) if self.token is not None else ()

    def for_channel(self, address: str) -> grpc.ChannelCredentials | None:
        """TLS credentials for a channel to this address; None for plain text.

        Raises StartupError where plain text would expose the token, and for a list of addresses with TLS: the
        certificate is checked against one name.
        """
        if self.authorities is None or is_unix(address):
            self.check_private(address)
            return None
        if "," in address:
            raise StartupError(f"with TLS, the replicas must be the addresses of one name, not a list, got {address}")
        key, chain = (self.pair.key, self.pair.chain) if self.pair else (None, None)
        return grpc.ssl_channel_credentials(self.authorities, key, chain)

    def check_private(self, address: str) -> None:
        if self.token is not None and not self.plaintext_token and not is_local(address):
            raise StartupError(
                f"the token would be sent to {address} in plain text: enable TLS with --tls-ca (of a service: "
                "--upstream-tls-ca), or pass --allow-plaintext-token if the network is private"
            )


NO_CREDENTIALS = Credentials()
