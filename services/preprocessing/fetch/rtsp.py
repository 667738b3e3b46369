"""Plays an RTSP stream over one TCP connection to an address that was checked before.

    client   DESCRIBE ─▶    SETUP ─▶    PLAY ─▶                    OPTIONS, so that the session stays
    server        ◀─ SDP      ◀─ session   ◀─ $ packet $ packet … $ packet …

Packets come in the same connection ("interleaved"), and nothing else is ever connected to: addresses that the server
names, in the description, in redirects or as the place of its tracks, are only text. Of several tracks the first with
video is played. Nobody here looks into packets, but for the goodbye of the server.

Source: RFC 2326 (RTSP 1.0; 10.12 interleaved data), RFC 4566 (SDP), RFC 3550, 6.6 (BYE).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import structlog

from framesieve.common.contract.errors import MediaRejected
from framesieve.services.preprocessing.fetch.addresses import IPAddress
from framesieve.services.preprocessing.fetch.urls import Url

_READ_BYTES = 2**16
_MAX_MESSAGE_BYTES = 2**16
# Of packets before PLAY is answered.
_MAX_EARLY_BYTES = 2**20
_SESSION_S = 60.0
_OK = 200
_BYE = 203
_DOLLAR = ord("$")
_STATUS = re.compile(r"RTSP/1\.[0-9] ([0-9]{3})(?: .*)?")
_SESSION = re.compile(r"([!-:<-~]+)(?:;timeout=([0-9]{1,5}))?.*")
_CHANNELS = re.compile(r"(?:^|.*;)interleaved=([0-9]{1,3})(?:-([0-9]{1,3}))?(?:;.*|$)")
_URL = re.compile(r"[!-~]+")
_LOST = "could not be played: the connection or the session broke off"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Packet:
    channel: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Message:
    """A response, or a request of the server's. headers: by their names in lower case."""

    start: str
    headers: dict[str, str]
    body: bytes

    @property
    def status(self) -> int | None:
        """None of a request."""
        found = _STATUS.fullmatch(self.start)
        return int(found[1]) if found else None


@asynccontextmanager
async def playing(
    url: Url, addresses: Sequence[IPAddress], connect_s: float, silent_s: float
) -> AsyncIterator[AsyncIterator[bytes]]:
    """Plays a stream: an iterator of its description, then of packets as they come, each after its length in 2 bytes.

    addresses: of the host, checked; they are tried in turn. connect_s: for each of them. silent_s: how long the server
    may send nothing.
    Entering and reading it raise MediaRejected for a server that cannot be reached, refuses, or breaks off.
    """
    reader, writer = await _connected(url, addresses, connect_s)
    try:
        session = _Session(url, reader, writer, silent_s)
        description = await session.play()
        staying = asyncio.create_task(session.stay())
        try:
            yield _described(description, session)
        finally:
            staying.cancel()
    finally:
        writer.transport.abort()


async def _described(description: bytes, session: _Session) -> AsyncIterator[bytes]:
    yield description
    async for packets in session.packets():
        yield packets


async def _connected(
    url: Url, addresses: Sequence[IPAddress], connect_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    failed: Exception | None = None
    for address in addresses:
        try:
            async with asyncio.timeout(connect_s):
                return await asyncio.open_connection(str(address), url.port)
        except (OSError, TimeoutError) as error:
            log.warning("address failed", host=url.host.name, address=str(address), error=repr(error))
            failed = error
    raise MediaRejected("cannot be connected to") from failed


class _Session:
    """One client's dialogue with a server."""

    def __init__(self, url: Url, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent_s: float) -> None:
        self._url, self._reader, self._writer, self._silent_s = url, reader, writer, silent_s
        self._number = 0
        self._left = b""
        self._early: list[_Packet] = []  # after PLAY was sent, before it is answered
        self._session, self._session_s = "", _SESSION_S
        self._channels = (0, 1)

    async def play(self) -> bytes:
        """Begins to play the first video track, and returns its description (SDP) without the others."""
        described = await self._ask("DESCRIBE", str(self._url), Accept="application/sdp")
        base = described.headers.get("content-base") or described.headers.get("content-location") or str(self._url)
        whole, track = _tracks(described.body.decode("utf-8", "replace").splitlines())
        setup = await self._ask("SETUP", _control(base, track), Transport="RTP/AVP/TCP;unicast;interleaved=0-1")
        session, channels = (
            form.fullmatch(setup.headers.get(name, "").replace(" ", ""))
            for name, form in (("session", _SESSION), ("transport", _CHANNELS))
        )
        if session is None or channels is None:
            raise MediaRejected("is played by a server that sends no packets in the connection itself (interleaved)")
        self._session, self._session_s = session[1], float(session[2] or _SESSION_S)
        self._channels = int(channels[1]), int(channels[2] or int(channels[1]) + 1)
        await self._ask("PLAY", _control(base, whole), Range="npt=0.000-")
        head = ["v=0", "o=- 0 0 IN IP4 0.0.0.0", "s=-", "t=0 0"]
        return "".join(f"{line}\r\n" for line in (*head, *track)).encode()

    async def stay(self) -> None:
        """Asks from time to time, so that the server does not end the session."""
        while True:
            await asyncio.sleep(max(1.0, self._session_s / 2))
            self._send("OPTIONS", str(self._url))

    async def packets(self) -> AsyncIterator[bytes]:
        """Packets of the track as they come, several at a time."""
        early, self._early = self._early, []
        parts: Iterator[_Packet | _Message] = iter(early)
        silent_until_s = self._later_s()
        while True:
            media, ended = [], False
            for each in parts:
                # FFmpeg takes one of no bytes for the end.
                if isinstance(each, _Packet) and each.channel == self._channels[0] and each.data:
                    media.append(len(each.data).to_bytes(2) + each.data)
                ended |= isinstance(each, _Packet) and each.channel == self._channels[1] and _says_bye(each.data)
            if media:
                yield b"".join(media)
                silent_until_s = self._later_s()
            if ended:
                return
            # Answers to OPTIONS, and other tracks, do not count.
            parts = iter(await self._receive(silent_until_s))

    async def _ask(self, method: str, url: str, **headers: str) -> _Message:
        """The response to a request. Raises MediaRejected for another status than 200."""
        self._send(method, url, **headers)
        early_bytes = 0
        while True:
            found: _Message | None = None
            for each in await self._receive(self._later_s()):
                if isinstance(each, _Packet):
                    early_bytes += 4 + len(each.data)
                    if method != "PLAY" or early_bytes > _MAX_EARLY_BYTES:
                        raise MediaRejected(f"is played by a server that sends packets before it answers {method}")
                    self._early.append(each)
                elif found is None and each.status is not None:
                    found = each
            if found is None:
                continue
            if found.status != _OK:
                raise MediaRejected(f"was answered with status {found.status} to {method}, only 200 is accepted")
            return found

    def _send(self, method: str, url: str, **headers: str) -> None:
        self._number += 1
        given = {"CSeq": str(self._number), "User-Agent": "framesieve", **headers}
        if self._session:
            given["Session"] = self._session
        lines = [f"{method} {url} RTSP/1.0", *(f"{name}: {value}" for name, value in given.items())]
        self._writer.write("".join(f"{line}\r\n" for line in (*lines, "")).encode())

    def _later_s(self) -> float:
        """When the server has been silent for too long, on the clock of the event loop."""
        return asyncio.get_running_loop().time() + self._silent_s

    async def _receive(self, until_s: float) -> list[_Packet | _Message]:
        """What has come since, at least one byte."""
        try:
            async with asyncio.timeout_at(until_s):
                data = await self._reader.read(_READ_BYTES)
        except TimeoutError as error:
            raise MediaRejected(f"has sent no video for {self._silent_s:g} s") from error
        except OSError as error:
            raise MediaRejected(_LOST) from error
        if not data:
            raise MediaRejected(_LOST)
        self._left += data
        parts, end = [], 0
        while found := self._part(end):
            part, end = found
            parts.append(part)
        self._left = self._left[end:]
        return parts

    def _part(self, begin: int) -> tuple[_Packet | _Message, int] | None:
        """The packet or message that begins there in what has come, once it is whole, and its end."""
        left = self._left
        if begin == len(left):
            return None
        if left[begin] == _DOLLAR:
            data = begin + 4
            end = data + int.from_bytes(left[begin + 2 : data])
            return (_Packet(left[begin + 1], left[data:end]), end) if len(left) >= max(data, end) else None
        head_end = left.find(b"\r\n\r\n", begin)
        length, headers, start = 0, {}, ""
        if head_end >= 0:
            start, *lines = left[begin:head_end].decode("utf-8", "replace").lstrip("\r\n").split("\r\n")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            told = headers.get("content-length", "0")
            length = int(told) if told.isascii() and told.isdecimal() and len(told) < 9 else _MAX_MESSAGE_BYTES
        body = (head_end if head_end >= 0 else len(left)) + 4  # without a whole head, after what has come
        end = body + length
        if end - begin > _MAX_MESSAGE_BYTES:
            raise MediaRejected("is played by a server that does not speak RTSP")
        return (_Message(start, headers, left[body:end]), end) if len(left) >= end else None


def _tracks(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """The lines of a description about the whole stream, and those about its first video track."""
    begins = [place for place, line in enumerate(lines) if line.startswith("m=")]
    for begin, end in pairwise((*begins, len(lines))):
        if lines[begin].startswith("m=video "):
            return list(lines[: begins[0]]), list(lines[begin:end])
    raise MediaRejected("has no video track")


def _control(base: str, lines: Sequence[str]) -> str:
    """The URL by which a track, or the whole stream, is controlled."""
    told = next((line.removeprefix("a=control:").strip() for line in lines if line.startswith("a=control:")), "*")
    if told == "*":
        url = base
    elif "://" in told:
        url = told
    else:
        # Not relative as in RFC 3986: servers append it, whether or not the base ends with a slash.
        url = f"{base.removesuffix('/')}/{told.removeprefix('/')}"
    if not _URL.fullmatch(url):
        raise MediaRejected("is described with a malformed URL of a track")
    return url


def _says_bye(data: bytes) -> bool:
    """Whether one of the reports in a packet of RTCP says that the sender leaves."""
    begin = 0
    while len(data) - begin >= 4:
        if data[begin + 1] == _BYE:
            return True
        begin += 4 + 4 * int.from_bytes(data[begin + 2 : begin + 4])
    return False
