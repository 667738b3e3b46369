"""Addresses that the gateway gives to a caller and takes without a token, for an hour.

A browser's <video> and other players send no Authorization header. A ticket names the caller, who got it with a token,
so that its requests count as the caller's.

    <base64 of ["client", "subject", when it expires]>.<base64 of its HMAC-SHA256>
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import time
from binascii import Error
from dataclasses import dataclass

from gridsieve.common.contract.errors import Unauthenticated

VALID_S = 3600.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """client: whose requests it is for. subject: what may be read with it."""

    client: str
    subject: str


class Tickets:
    """Key and clock are this process's own: other gateways, and this one after a restart, refuse its tickets."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def written(self, ticket: Ticket) -> str:
        """The ticket as a part of a path."""
        told = json.dumps([ticket.client, ticket.subject, time.monotonic() + VALID_S]).encode()
        return f"{_encoded(told)}.{_encoded(self._sign(told))}"

    def read(self, text: str) -> Ticket:
        """Raises Unauthenticated for what `written` did not return within the last hour."""
        told, _, sign = text.partition(".")
        try:
            decoded = _decoded(told)
            if hmac.compare_digest(self._sign(decoded), _decoded(sign)):
                client, subject, until_s = json.loads(decoded)
                if time.monotonic() < until_s:
                    return Ticket(client, subject)
        except (Error, ValueError):
            pass
        raise Unauthenticated("the film's address has expired, or is of another gateway: search again")

    def _sign(self, told: bytes) -> bytes:
        return hmac.digest(self._key, told, "sha256")


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
