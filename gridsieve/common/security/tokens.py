"""Bearer tokens: their syntax, the token that a caller sends, and the tokens that a listener accepts.

    # name   token, as `openssl rand -base64 32` prints it
    alice    yv1mWbLwHk9R0uYlO2Ew…
    alice    pT6FzX0Qm8sJvC4dNa7L…      a second token of alice: both are valid, so a token can be replaced

A file that cannot be used raises StartupError. The error names the flag and never quotes the file.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from gridsieve.common.contract.errors import StartupError

AUTHORIZATION_KEY = "authorization"
MIN_TOKEN_CHARACTERS = 16

TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""Source: RFC 6750, section 2.1."""
_BEARER = re.compile(r"Bearer +(\S+)", re.IGNORECASE)

log = logging.getLogger("gridsieve.security")  # standard logging: the client package needs no structlog


class Tokens:
    """The tokens that a listener accepts, as sha256 digests. names: the client's name by digest."""

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._names = tuple(names.items())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self._names)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads --auth-tokens-file: a name and a token on each line."""
        flag = "--auth-tokens-file"
        names: dict[bytes, str] = {}
        for number, line in enumerate(_text(flag, path).splitlines(), 1):
            words = line.partition("#")[0].split()
            where = f"{flag} {path}, line {number}"
            if not words:
                continue
            if len(words) != 2:
                raise StartupError(f"{where}: expected a name and a token, got {len(words)} words")
            name, token = words
            check_token(where, token)
            if _digest(token) in names:
                raise StartupError(f"{where}: the same token as one of {names[_digest(token)]}")
            names[_digest(token)] = name
        if not names:
            raise StartupError(f"{flag} {path} holds no token, so every call would be refused")
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("every user of this machine can read the tokens of %s %s", flag, path)
        return cls(names)

    def name_of(self, authorization: str) -> str | None:
        """The name for the header `Bearer <token>`; None for an unknown token or another header.

        It compares with every token in constant time, so its duration tells nothing about them.
        """
        bearer = _BEARER.fullmatch(authorization)
        presented, found = _digest(bearer[1] if bearer else ""), None
        for digest, name in self._names:
            if hmac.compare_digest(digest, presented):
                found = name
        return found


def read_token(flag: str, path: Path) -> str:
    """The token of a file that holds nothing else. flag: names the file in errors."""
    token = _text(flag, path).strip()
    check_token(f"{flag} {path}", token)
    return token


def check_token(where: str, token: str) -> None:
    """Raises StartupError for text that is no valid token. where: the token's place, for the error."""
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise StartupError(f"{where}: a token has at least {MIN_TOKEN_CHARACTERS} characters, got {len(token)}")
    if not TOKEN.fullmatch(token):
        raise StartupError(f"{where}: a token consists of letters, digits and -._~+/, with = only at its end")


def _text(flag: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise StartupError(f"{flag} {path} must be UTF-8 text") from None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
