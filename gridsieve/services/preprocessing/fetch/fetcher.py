"""Fetches media from http and https URLs, and opens streams, safe against server-side request forgery (SSRF).

Each host name is resolved once, all of its addresses are checked against the policy, and one of exactly these addresses
is dialled. httpx gets the address, the Host header and the name that the certificate must hold, so it cannot resolve
the name again (DNS rebinding); the worker of a camera gets what comes by the connection, and not its socket. Every
redirect repeats the whole check. A connection serves one request only. Only httpx's transport is used: it knows no
cookies, no proxies from the environment, no credentials, no content decoding and no redirects. A password goes to its
own host, which asks for it.

Error texts reveal nothing about the internal network: no address, no target of a redirect, and no difference between an
unknown name and a forbidden one. The log holds the details.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import string
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import TypeAlias, TypeVar
from urllib.parse import quote, urljoin

import httpx
import structlog

from gridsieve.common.contract.errors import InvalidRequest, MediaForbidden, MediaRejected, within
from gridsieve.services.preprocessing.fetch.addresses import IPAddress, SystemResolver
from gridsieve.services.preprocessing.fetch.body_cache import Body, BodyCache, Terms
from gridsieve.services.preprocessing.fetch.camera import Camera, connected, relayed
from gridsieve.services.preprocessing.fetch.disk import DiskBudget, FetchedFile
from gridsieve.services.preprocessing.fetch.download import Download, gathered, watched
from gridsieve.services.preprocessing.fetch.login import Login
from gridsieve.services.preprocessing.fetch.policy import FetchPolicy
from gridsieve.services.preprocessing.fetch.urls import FILE_SCHEMES, STREAM_SCHEMES, Url, parse_url
from gridsieve.services.preprocessing.sources.in_thread import in_thread
from gridsieve.services.preprocessing.sources.source import Source, resource_errors_as_overloaded

log = structlog.get_logger()

T = TypeVar("T")

# Resolves a host name to its addresses. Raises OSError for a name without any.
Resolve: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]

# Each fetch holds a connection and a file open, and processes are often limited to 1024 descriptors.
MAX_CONCURRENT_FETCHES = 128

_PIECE_BYTES = 2**20
# FFmpeg's RTSP client cuts longer ones.
_MAX_CAMERA_TARGET = 2047

_HEADERS = {"User-Agent": "gridsieve", "Accept": "*/*", "Accept-Encoding": "identity"}


class _UnknownHost(MediaRejected):
    """A host name without any address."""


class Fetcher:
    """Fetches URLs under one policy.

    resolve: defaults to the system's resolver. tls: defaults to the usual certificate authorities or SSL_CERT_FILE.
    logins: of hosts that streams come from, by name, where a URL has none. on_bytes: told how many bytes come from
    servers. on_get: told whether a URL's kept body was used.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
        logins: Mapping[str, Login] | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_get: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._policy = policy
        self._logins = logins or {}
        self._resolve = resolve or SystemResolver(MAX_CONCURRENT_FETCHES).look_up
        self._tls = tls or httpx.create_ssl_context()
        self._disk = DiskBudget(policy.disk_bytes)
        self._bodies = BodyCache(self._disk)
        self._on_bytes, self._on_get = on_bytes, on_get
        self._running = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)

    def close(self) -> None:
        """Deletes the bodies that were kept."""
        self._bodies.close()

    async def fetch_all(self, urls: Mapping[str, str]) -> dict[str, Source]:
        """Fetches all URLs side by side. If one fails, the others are cancelled and their files closed.

        urls: by the name of the media item. Raises what `fetch` raises for the first that fails.
        """
        with ExitStack() as sources:

            async def fetch(name: str, url: str) -> Source:
                source = await self.fetch(name, url)
                sources.callback(source.close)
                return source

            try:
                async with asyncio.TaskGroup() as group:
                    fetching = {name: group.create_task(fetch(name, url)) for name, url in urls.items()}
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            sources.pop_all()
            return {name: task.result() for name, task in fetching.items()}

    async def fetch(self, name: str, url: str) -> Source:
        """Fetches the body into an unnamed file, or takes the one that was kept. The caller closes the source.

        name: of the media item, for error texts. Cancelling closes the connection and the file.
        Raises InvalidRequest for a malformed URL; MediaForbidden for a target that the policy forbids; MediaRejected
        for a body that is missing, too large or too slow, or for too many redirects; Overloaded where the machine is
        out of disk or descriptors.
        """
        with resource_errors_as_overloaded(f"{name}.url"), within(f"{name}.url"):
            try:
                async with self._running, asyncio.timeout(self._policy.total_s):
                    body = await self._follow(parse_url(url), self._get)
                    return Source(name, body.digest, body.file.descriptor, body.file.close)
            except TimeoutError as error:
                raise MediaRejected(f"took longer than the allowed {self._policy.total_s:g} s") from error

    @asynccontextmanager
    async def stream(self, name: str, url: str, every_s: float) -> AsyncIterator[Camera | Download]:
        """Opens a stream: a camera, or bytes as the server sends them. Leaving the block closes the connection.

        name: of the field that holds the URL, for error texts. every_s: as in `watched`.
        Opening and reading it raise as `fetch` does, except that a stream has no largest size: MediaRejected also where
        it breaks off, or is silent for longer than a fetch may take.
        """
        async with AsyncExitStack() as stack:
            with resource_errors_as_overloaded(name), within(name):
                parsed = parse_url(url, STREAM_SCHEMES)
                login = parsed.login or self._logins.get(parsed.host.name)
                parsed = replace(parsed, login=login)
                if parsed.scheme in FILE_SCHEMES:
                    source: Camera | Download = await self._download(stack, parsed)
                else:
                    source = await self._in_time(self._camera(stack, parsed))
            if isinstance(source, Download):
                pieces = watched(source, partial(self._download, stack, parsed), every_s)
                source = replace(source, pieces=self._read(name, pieces))
            yield source

    async def _in_time(self, begun: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._policy.total_s):
                return await begun
        except TimeoutError as error:
            raise MediaRejected(f"did not begin within the allowed {self._policy.total_s:g} s") from error

    async def _download(self, stack: AsyncExitStack, url: Url) -> Download:
        """Closes what `stack` has from before."""
        await stack.aclose()
        return await self._in_time(self._follow(url, partial(self._open, stack, url)))

    async def _camera(self, stack: AsyncExitStack, url: Url) -> Camera:
        if len(url.target) > _MAX_CAMERA_TARGET:
            raise InvalidRequest(f"must have a path and a query of at most {_MAX_CAMERA_TARGET} characters")
        addresses = await self._addresses(url)
        tls = self._tls if url.scheme == "rtsps" else None
        connection = await connected(url, addresses, self._policy.connect_s, tls)
        theirs = await stack.enter_async_context(relayed(connection, self._on_bytes))
        return Camera(theirs, url.target, f"{url.login.quoted}@" if url.login else "", self._policy.total_s)

    async def _read(self, name: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        with resource_errors_as_overloaded(name), within(name):
            async for piece in pieces:
                self._on_bytes(len(piece))
                yield piece

    async def _open(
        self, stack: AsyncExitStack, first: Url, url: Url, addresses: Sequence[IPAddress]
    ) -> Download | str:
        """The body as it comes, while `stack` is open; or the Location of a redirect. first: before all redirects."""
        login = first.login if (first.scheme, first.authority) == (url.scheme, url.authority) else None
        async with AsyncExitStack() as opening:
            with _broken_off(url):
                transport = httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
                await opening.enter_async_context(transport)
                ask = partial(self._answer, transport, url, addresses, read_s=self._policy.total_s)
                response = await opening.enter_async_context(aclosing(await ask({})))
                refused = response.status_code == httpx.codes.UNAUTHORIZED
                if login and refused and (header := login.authorization(url.target, response)):
                    await response.aclose()  # its connection would stay open as long as the stream
                    response = await opening.enter_async_context(aclosing(await ask({"Authorization": header})))
                if response.has_redirect_location:
                    return _escaped(response.headers["Location"].encode(response.headers.encoding))
                _check_answer(response)
            pieces = await opening.enter_async_context(aclosing(gathered(_body(url, response))))
            await stack.enter_async_context(opening.pop_all())
            return Download(response.headers.get("Content-Type", "").partition(";")[0].strip().lower(), pieces)

    async def _follow(self, url: Url, get: Callable[[Url, Sequence[IPAddress]], Awaitable[T | str]]) -> T:
        """What `get` makes of the URL, or of the last one that it redirects to."""
        addresses = await self._addresses(url)
        for _ in range(self._policy.max_redirects + 1):
            answer = await get(url, addresses)
            if not isinstance(answer, str):
                return answer
            try:
                url = parse_url(urljoin(str(url), answer))
                addresses = await self._addresses(url)
            except (_UnknownHost, MediaForbidden) as error:  # the same for both: servers must not explore our names
                raise MediaForbidden("redirects to an address that may not be reached") from error
            except MediaRejected as error:
                raise MediaRejected(f"redirects to a host whose name lookup took {self._too_long}") from error
            except (InvalidRequest, ValueError) as error:
                raise MediaRejected("redirects to a malformed URL") from error
        raise MediaRejected(f"redirects more than {self._policy.max_redirects} times")

    async def _addresses(self, url: Url) -> list[IPAddress]:
        """The host's addresses: at least one, all allowed. Raises MediaForbidden, MediaRejected if none is found."""
        self._policy.check_url(url)
        if url.host.address is not None:
            addresses = [url.host.address]
        else:
            try:
                async with asyncio.timeout(self._policy.look_up_s):
                    addresses = [ip_address(address) for address in await self._resolve(url.host.name)]
            except TimeoutError as error:
                log.warning("name not looked up in time", host=url.host.name)
                raise MediaRejected(f"has a host whose name lookup took {self._too_long}: {url.host.name!r}") from error
            except OSError as error:
                raise _UnknownHost(f"names a host that cannot be resolved: {url.host.name!r}") from error
        if not self._policy.admits(url.host, addresses):
            log.warning("host refused", host=url.host.name, addresses=[str(address) for address in addresses])
            raise MediaForbidden(
                f"has no address that may be reached: {url.host.name!r}; --allow-media-domain allows hosts of private "
                f"networks"
            )
        return addresses

    @property
    def _too_long(self) -> str:
        return f"longer than the allowed {self._policy.look_up_s:g} s"

    async def _get(self, url: Url, addresses: Sequence[IPAddress]) -> Body | str:
        """The body, whose file the caller closes, or the Location of a redirect."""
        kept = self._bodies.find(str(url))
        if kept is not None and kept.is_fresh:
            self._on_get(True)
            return kept
        with ExitStack() as files:
            if kept is not None:
                files.callback(kept.file.close)
            answer = await self._ask(url, addresses, kept)
            if kept is not None and answer is kept:
                files.pop_all()
            self._on_get(answer is kept)
            return answer

    async def _ask(self, url: Url, addresses: Sequence[IPAddress], kept: Body | None) -> Body | str:
        """Fetches the body, unless the server says that the one that was kept has not changed."""
        conditions = kept.conditions if kept else {}
        with _broken_off(url):
            async with (
                httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False) as transport,
                aclosing(await self._answer(transport, url, addresses, conditions)) as response,
            ):
                terms = Terms.of(response.headers)
                if kept is not None and conditions and response.status_code == httpx.codes.NOT_MODIFIED:
                    self._bodies.keep(str(url), replace(kept, terms=terms or kept.terms))
                    return kept
                if response.has_redirect_location:
                    return _escaped(response.headers["Location"].encode(response.headers.encoding))
                _check_answer(response)
                self._check_size(int(response.headers.get("Content-Length", 0)))
                body = replace(await self._receive(response), terms=terms)
                self._bodies.keep(str(url), body)
                return body

    async def _answer(
        self,
        transport: httpx.AsyncHTTPTransport,
        url: Url,
        addresses: Sequence[IPAddress],
        conditions: Mapping[str, str],
        read_s: float | None = None,
    ) -> httpx.Response:
        """The response of the first address that accepts a connection; its body is not read yet.

        read_s: how long the server may be silent; None: for as long as the fetch lasts.
        """
        failed: httpx.TransportError | None = None
        for address in addresses:
            request = httpx.Request(
                "GET",
                httpx.URL(scheme=url.scheme, host=str(address), port=url.port),
                headers={"Host": url.authority, **_HEADERS, **conditions},
                extensions={
                    "sni_hostname": url.host.name,
                    "target": url.target.encode(),
                    "timeout": {"connect": self._policy.connect_s, "read": read_s},
                },
            )
            try:
                return await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                log.warning("address failed", host=url.host.name, address=str(address), error=repr(error))
                failed = error
        raise MediaRejected("cannot be connected to, or has no valid certificate") from failed

    async def _receive(self, response: httpx.Response) -> Body:
        """Writes and hashes on a thread: a piece takes milliseconds, which other requests would wait."""
        digest = hashlib.sha256()
        file = FetchedFile(self._disk)
        try:
            async for piece in response.aiter_raw(_PIECE_BYTES):
                self._check_size(file.size_bytes + len(piece))
                await in_thread(partial(_take, piece, file, digest))
                self._on_bytes(len(piece))
            if not file.size_bytes:
                raise MediaRejected("is empty")
        except BaseException:
            file.close()
            raise
        return Body(file, digest.digest())

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._policy.max_bytes:
            raise MediaRejected(f"has more than the {self._policy.max_bytes} bytes that --fetch-max-bytes allows")


@contextmanager
def _broken_off(url: Url) -> Iterator[None]:
    """Raises MediaRejected for errors of the connection inside."""
    try:
        yield
    except (httpx.TransportError, ssl.SSLError) as error:  # httpx does not wrap SSLErrors in mid-stream
        log.warning("media not fetched", host=url.host.name, error=repr(error))
        raise MediaRejected("could not be fetched: the connection or the response broke off") from error


def _check_answer(response: httpx.Response) -> None:
    """Raises MediaRejected for a status or encoding that is not accepted."""
    if response.status_code != httpx.codes.OK:
        raise MediaRejected(f"was answered with status {response.status_code}, only 200 is accepted")
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise MediaRejected(f"was answered with Content-Encoding {encoding[:32]!r}, only identity is accepted")


async def _body(url: Url, response: httpx.Response) -> AsyncIterator[bytes]:
    with _broken_off(url):
        async for piece in response.aiter_raw():
            yield piece


def _escaped(location: bytes) -> str:
    """A Location in ASCII: spaces and letters beyond ASCII percent-encoded byte by byte, as browsers do."""
    return quote(location, safe=string.punctuation)


def _take(piece: bytes, file: FetchedFile, digest: hashlib._Hash) -> None:
    file.write(piece)
    digest.update(piece)
