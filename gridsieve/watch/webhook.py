"""Events to a webhook: each one is a POST, signed as Standard Webhooks says.

    webhook-id: the event's id                      the same each time that it is tried
    webhook-timestamp: 1796860984
    webhook-signature: v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=

Source: https://www.standardwebhooks.com, version 1.0.0.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import httpx
from standardwebhooks import Webhook as Signer

from gridsieve.watch.cameras import Webhook
from gridsieve.watch.events import CONTENT_TYPE
from gridsieve.watch.outbox import Letter, Refused, Undelivered

_TIMEOUT_S = 10.0
_LATER = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)


class WebhookSender:
    """A 2xx delivers an event. 408, 425, 429, 5xx and no answer are tried again; anything else refuses the event."""

    def __init__(self, wanted: Webhook) -> None:
        self.name = f"webhook {httpx.URL(wanted.url).host}"
        self._url = wanted.url
        self._signer = None if wanted.secret is None else Signer(wanted.secret)
        self._http = httpx.AsyncClient(timeout=_TIMEOUT_S)

    async def deliver(self, letter: Letter) -> None:
        headers = {"content-type": CONTENT_TYPE}
        if self._signer:
            now = datetime.now(UTC)
            signature = self._signer.sign(letter.id, now, letter.body.decode())
            headers |= {"webhook-id": letter.id, "webhook-timestamp": str(int(now.timestamp()))}
            headers |= {"webhook-signature": signature}
        try:
            async with asyncio.timeout(_TIMEOUT_S):  # httpx's are of each read alone
                response = await self._http.post(self._url, content=letter.body, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise Undelivered(f"no answer within {_TIMEOUT_S:g} s") from error
        except httpx.HTTPError as error:
            raise Undelivered(str(error) or type(error).__name__) from error
        told = f"{response.status_code} {response.reason_phrase}".strip()
        if response.is_server_error or response.status_code in _LATER:
            raise Undelivered(told)
        if not response.is_success:
            raise Refused(told)

    async def close(self) -> None:
        await self._http.aclose()
