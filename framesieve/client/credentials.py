"""How services are reached that do not answer everybody: whom to trust, and what to show."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TypedDict

from common.contract.errors import StartupError
from common.security.certificates import read_authorities, read_pair
from common.security.credentials import Credentials
from common.security.tokens import check_token
from framesieve.client.prompt import StrPath


class Access(TypedDict, total=False):
    """What is left out, or None, is not used. No TLS is spoken on unix sockets.

    tls_ca: PEM file of the authorities that may have issued the service's certificate; it makes the connection TLS.
    tls_cert, tls_key: PEM files, shown to a service that asks for a certificate.
    token: shown with every call. A service knows callers by it (--auth-tokens-file).
    allow_plaintext_token: lets the token go to other machines without TLS.
    """

    tls_ca: StrPath | None
    tls_cert: StrPath | None
    tls_key: StrPath | None
    token: str | None
    allow_plaintext_token: bool


def credentials_of(access: Access) -> Credentials:
    """Raises StartupError for half a setting, for files that cannot be used and for what is no token."""
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
