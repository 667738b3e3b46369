"""User names and passwords of cameras: from their URLs, or from a file of the operator's. They are never shown."""

from __future__ import annotations

import netrc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import httpx

from gridsieve.common.contract.errors import InvalidRequest, StartupError

# FFmpeg reads no more of them, percent-encoded, in an RTSP URL.
_MAX_CHARACTERS = 127


@dataclass(frozen=True, slots=True)
class Login:
    user: str = field(repr=False)
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        """Raises InvalidRequest for one that cannot be sent."""
        if not (self.user + self.password).isprintable() or ":" in self.user:
            raise InvalidRequest("has a user name or a password with control characters, or a user name with a colon")
        if len(self.quoted) > _MAX_CHARACTERS:
            raise InvalidRequest(
                f"has a user name and a password of more than {_MAX_CHARACTERS} characters together, percent-encoded"
            )

    @classmethod
    def parse(cls, text: str) -> Login:
        """user:password, both percent-encoded. Raises InvalidRequest for one that cannot be sent."""
        user, _, password = text.partition(":")
        try:
            return cls(unquote(user, errors="strict"), unquote(password, errors="strict"))
        except UnicodeDecodeError:  # whose text holds the password
            raise InvalidRequest("has a user name or a password that is not UTF-8, percent-encoded") from None

    @property
    def quoted(self) -> str:
        return f"{quote(self.user, safe='')}:{quote(self.password, safe='')}"

    def authorization(self, target: str, refusal: httpx.Response) -> str | None:
        """The header that answers a response with status 401: by Digest where the server takes it, otherwise by Basic.

        target: path and query that were asked for. None: the server wants neither.
        """
        asked = httpx.Request("GET", httpx.URL("http://host").copy_with(raw_path=target.encode()))
        refusal.request = asked
        flow = httpx.DigestAuth(self.user, self.password).auth_flow(asked)
        next(flow)
        try:
            answer = flow.send(refusal)
        except (StopIteration, KeyError, ValueError, NotImplementedError, httpx.ProtocolError):
            # No challenge of Digest, a malformed one, or an algorithm or a protection that httpx does not know.
            if not any(each.lower().startswith("basic") for each in refusal.headers.get_list("www-authenticate")):
                return None
            flow = httpx.BasicAuth(self.user, self.password).auth_flow(asked)
            answer = next(flow)
        header: str = answer.headers["Authorization"]
        return header


def logins_of(path: Path | None) -> Mapping[str, Login]:
    """The logins by host name that a file in netrc's format has. Raises StartupError for one that cannot be read."""
    if path is None:
        return {}
    try:
        hosts = netrc.netrc(path).hosts
    except OSError as error:
        raise StartupError(f"--media-credentials-file {path} cannot be read: {error.strerror}") from error
    except (netrc.NetrcParseError, ValueError) as error:  # whose text may hold the password
        place = f", line {error.lineno}," if isinstance(error, netrc.NetrcParseError) else ""
        raise StartupError(f"--media-credentials-file {path}{place} is not in netrc's format") from None
    if "default" in hosts:
        raise StartupError(f"--media-credentials-file {path} must not have a default: every host would be told it")
    try:
        return {host.lower(): Login(user, password) for host, (user, _, password) in hosts.items()}
    except InvalidRequest as error:
        raise StartupError(f"--media-credentials-file {path} {error}") from None
