"""TLS files and bearer token for services that require them."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TypedDict

from gridsieve.client.prompt import StrPath
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.security.certificates import read_authorities, read_pair
from gridsieve.common.security.credentials import Credentials
from gridsieve.common.security.tokens import check_token


class Access(TypedDict, total=False):
    """How to connect; every key is optional. Unix sockets never use TLS.

    tls_ca: PEM file of the authorities that the service's certificate is verified against; setting it enables TLS.
    tls_cert, tls_key: PEM files of the client certificate, for services that require one.
    token: bearer token sent with every call (the service's --auth-tokens-file).
    allow_plaintext_token: send the token to other machines without TLS as well.
    """

    tls_ca: StrPath | None
    tls_cert: StrPath | None
    tls_key: StrPath | None
    token: str | None
    allow_plaintext_token: bool


def credentials_of(access: Access) -> Credentials:
    """Raises StartupError for an incomplete combination, an unreadable file or a malformed token."""
    authorities, cert, key = access.get("tls_ca"), access.get("tls_cert"), access.get("tls_key")
    for flag, value, missing, needed in (
        ("--tls-cert", cert, "--tls-key", key),
        ("--tls-key", key, "--tls-cert", cert),
        ("--tls-cert", cert, "--tls-ca", authorities),
    ):
        if value is not None and needed is None:
            raise StartupError(f"{flag} {value} needs {missing}, which is not set")
    token = access.get("token")
    if token is not None:
        check_token("token", token)
    return Credentials(
        authorities=None if authorities is None else read_authorities("--tls-ca", Path(authorities)),
        pair=None if cert is None or key is None else read_pair(Path(cert), Path(key), ssl.Purpose.CLIENT_AUTH),
        token=token,
        plaintext_token=access.get("allow_plaintext_token", False),
    )
