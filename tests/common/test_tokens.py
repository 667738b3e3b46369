"""Bearer tokens: which files are accepted, which name a token has, and that no error or log quotes one."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Any

import pytest

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.security.tokens import Tokens, read_token

ALICE, BOB, SPARE = "alice-token-0123456789+/=", "bob.token~0123456789", "alice-token-spare-0001"


def written(folder: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens.read(written(tmp_path, f"# callers\n\nalice {ALICE}\n  bob\t{BOB}  # since May\nalice {SPARE}\n"))


def test_a_token_has_the_name_of_its_line_and_a_name_may_have_two(tokens: Tokens) -> None:
    assert [tokens.name_of(f"Bearer {token}") for token in (ALICE, BOB, SPARE)] == ["alice", "bob", "alice"]
    assert tokens.name_of(f"bearer  {ALICE}") == "alice"  # RFC 7235: schemes are case-insensitive


@pytest.mark.parametrize(
    "shown",
    ["", ALICE, f"Basic {ALICE}", f"Bearer {ALICE} {BOB}", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", "Bearer ä"],
)
def test_anything_but_a_known_token_has_no_name(tokens: Tokens, shown: str) -> None:
    assert tokens.name_of(shown) is None


@pytest.mark.parametrize("token", [ALICE, "unknown-token-0123456"])
def test_every_token_is_compared_in_constant_time(tokens: Tokens, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens.name_of(f"Bearer {token}")
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# alice\n", "holds no token, so every call would be refused"),
        ("secret-secret-secret\n", "line 1: expected a name and a token, got 1 words"),
        ("\nalice secret-15-chars", "line 2: a token has at least 16 characters, got 15"),
        ("alice secret'secret'secret", "line 1: a token consists of letters, digits"),
        ("alice secret-secret-secret\nbob secret-secret-secret", "line 2: the same token as one of alice"),
        (b"\xff\xfe", "must be UTF-8 text"),
    ],
)
def test_a_malformed_file_is_refused_without_quoting_a_token(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(StartupError) as info:
        Tokens.read(path)
    assert str(info.value).startswith(f"--auth-tokens-file {path}")
    assert message in str(info.value)
    assert "secret" not in str(info.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o640, False), (0o644, True)])
def test_a_world_readable_file_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    Tokens.read(written(tmp_path, f"alice {ALICE}", mode))
    assert [each.levelno for each in caplog.records] == [logging.WARNING] * warned
    assert ALICE not in caplog.text


def test_a_token_file_for_upstream_holds_one_token_only(tmp_path: Path) -> None:
    assert read_token("--upstream-token-file", written(tmp_path, f"{ALICE}\n")) == ALICE
    for content in ("secret", f"alice {ALICE}", f"{ALICE}\n{BOB}", ""):
        with pytest.raises(StartupError, match=r"--upstream-token-file .*: a token") as info:
            read_token("--upstream-token-file", written(tmp_path, content))
        assert ALICE not in str(info.value)
        assert "secret" not in str(info.value)
    with pytest.raises(StartupError, match=r"--upstream-token-file .* cannot be read: No such file"):
        read_token("--upstream-token-file", tmp_path / "missing")
