"""Sends the requests of a job to a gateway, over HTTP.

async with HttpAsker("http://127.0.0.1:8000") as asker:
    reply = await asker.ask(line_of("a.mp4", "/v1/chat/completions", body))
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from types import TracebackType
from typing import Self, Unpack
from urllib.parse import SplitResult, urlsplit

import httpx

from gridsieve.client.credentials import Access, credentials_of
from gridsieve.common.contract.errors import StartupError, Unauthenticated, Unavailable
from gridsieve.jobs.lines import OK, Line, Reply

_CONNECT_S = 10.0
_JSON = {"content-type": "application/json"}


class HttpAsker:
    """A connection to a gateway, for any number of requests at once. An async context manager.

    url: http://host:port or https://host:port. access: see `Access`; an https URL without tls_ca is checked against
    the system's authorities.
    Raises StartupError for an unusable URL, file or token, and for a token that would be sent to another machine
    unencrypted.
    """

    def __init__(self, url: str, **access: Unpack[Access]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or not _has_port(parts):
            raise StartupError(f"--gateway must be http://host:port or https://host:port, got {url!r}")
        credentials = credentials_of(access)
        if parts.scheme == "http":
            credentials.check_private(f"{parts.hostname}:{parts.port or 80}")
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=_tls(access) if parts.scheme == "https" else False,
            headers=dict(credentials.metadata),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy would see the token
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def hears(self) -> bool:
        """Whether its model takes sounds.

        Raises Unavailable if no gateway that can answer is there, Unauthenticated if it does not know the caller.
        """
        reply = await self._reply("GET", "/v1/models")
        if reply.status_code == httpx.codes.UNAUTHORIZED:
            raise Unauthenticated(reply.message)
        if reply.status_code != OK or not isinstance(reply.body, dict):
            raise Unavailable(
                reply.message or f"{self.url} is no gateway: GET /v1/models is {reply.status_code}", "gateway"
            )
        match reply.body:
            case {"data": [{"sounds": True}, *_]}:
                return True
        return False

    async def ask(self, line: Line) -> Reply:
        """The reply to a request; one of status 503 where the gateway cannot be reached."""
        return await self._reply("POST", line.url, line.body)

    async def _reply(self, method: str, path: str, body: bytes | None = None) -> Reply:
        try:
            response = await self._client.request(method, path, content=body, headers=_JSON)
        except httpx.HTTPError as error:
            text = f"{self.url} cannot be reached: {error or type(error).__name__}"
            return Reply(httpx.codes.SERVICE_UNAVAILABLE, "", {"error": {"message": text, "code": "UNAVAILABLE"}})
        told: object = response.text
        with suppress(ValueError):
            told = response.json()
        after_s = 1.0
        with suppress(ValueError):
            after_s = max(0.0, float(response.headers.get("retry-after", "")))
        return Reply(response.status_code, response.headers.get("x-request-id", ""), told, after_s)


def _has_port(parts: SplitResult) -> bool:
    """Whether its port is a number, or unset."""
    try:
        return parts.port != 0
    except ValueError:
        return False


def _tls(access: Access) -> ssl.SSLContext:
    authorities, cert, key = access.get("tls_ca"), access.get("tls_cert"), access.get("tls_key")
    context = ssl.create_default_context(cafile=authorities)
    if cert is not None and key is not None:
        context.load_cert_chain(cert, key)
    return context
