"""Bearer tokens: what may be one, the one that a caller shows, and whose each is that a listener knows.

    # who    token, as `openssl rand -base64 32` makes them
    alice    yv1mWbLwHk9R0uYlO2Ew…
    alice    pT6FzX0Qm8sJvC4dNa7L…      two of one name: both are taken while one replaces the other

Whatever is wrong with a file is a StartupError that names its flag and never quotes what the file holds.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import structlog

from common.contract.errors import StartupError

AUTHORIZATION_KEY = "authorization"
MIN_TOKEN_CHARACTERS = 16

# RFC 6750, 2.1.
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)

log = structlog.get_logger()


class Tokens:
    """Whom tokens belong to. It holds their digests alone.

    names: by sha256 of the token.
    """

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._names = tuple(names.items())

    @classmethod
    def read(cls, path: Path) -> Self:
        """The tokens of --auth-tokens-file, a name and a token each line."""
        flag = "--auth-tokens-file"
        names: dict[bytes, str] = {}
        for number, line in enumerate(_text(flag, path).splitlines(), 1):
            words = line.partition("#")[0].split()
            where = f"{flag} {path}, line {number}"
            if not words:
                continue
            if len(words) != 2:
                raise StartupError(f"{where}: a name and a token are due, here are {len(words)} words")
            name, token = words
            check_token(where, token)
            if _digest(token) in names:
                raise StartupError(f"{where}: the token of {names[_digest(token)]} comes again")
            names[_digest(token)] = name
        if not names:
            raise StartupError(f"{flag} {path} holds no token: nobody could call")
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("every user of this machine can read the tokens", auth_tokens_file=str(path))
        return cls(names)

    def name_of(self, authorization: str) -> str | None:
        """Whom the token of `Bearer <token>` belongs to; None: nobody, or it is none.

        It takes as long whether or not a token is known, or nearly is.
        """
        bearer = _BEARER.fullmatch(authorization)
        presented, found = _digest(bearer[1] if bearer else ""), None
        for digest, name in self._names:
            if hmac.compare_digest(digest, presented):
                found = name
        return found


def read_token(flag: str, path: Path) -> str:
    """The token that a file holds and nothing else."""
    token = _text(flag, path).strip()
    check_token(f"{flag} {path}", token)
    return token


def _text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise StartupError(f"{flag} {path} must be text") from None


def check_token(where: str, token: str) -> None:
    """Raises StartupError for what may not be a token. where: it stands, as the error says."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise StartupError(f"{where}: a token has at least {MIN_TOKEN_CHARACTERS} characters, here are {len(token)}")
    if not _TOKEN.fullmatch(token):
        raise StartupError(f"{where}: a token is made of letters, digits and -._~+/, with = at its end alone")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
