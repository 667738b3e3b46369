"""Bearer tokens: which files are accepted, which name a token has, and that no error or log quotes one."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Any

import pytest

from common.contract.errors import StartupError
from common.security.tokens import Tokens, read_token

ALICE, BOB, SPARE = "alice-token-0123456789+/=", "bob.token~0123456789", "alice-token-spare-0001"


def written(folder: Path, content: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens.read(written(tmp_path, f"# callers\n\nalice {ALICE}\n  bob\t{BOB}  # since May\nalice {SPARE}\n"))


@pytest.mark.parametrize(("token", "name"), [(ALICE, "alice"), (SPARE, "alice"), (BOB, "bob")])
def test_a_token_has_the_name_of_its_line_and_a_name_may_have_two(tokens: Tokens, token: str, name: str) -> None:
    assert tokens.name_of(f"Bearer {token}") == name
    assert tokens.name_of(f"bearer  {token}") == name  # RFC 7235: schemes are case-insensitive


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer {ALICE} {BOB}", f"Bearer {ALICE[:-1]}",
              f"Bearer {ALICE}x", f"Bearer {ALICE.upper()}", "Bearer alice", f"Bearer {ALICE}\n", "Bearer ä"]
)  # fmt: skip
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
        ("alice secret-secret-secret extra", "line 1: expected a name and a token, got 3 words"),
        ("\nalice secret-15-chars", "line 2: a token has at least 16 characters, got 15"),
        ("alice secret'secret'secret", "line 1: a token consists of letters, digits"),
        ("alice secret-secret-secret\nbob secret-secret-secret", "line 2: the same token as one of alice"),
    ],
)
def test_a_malformed_file_is_refused_without_quoting_a_token(tmp_path: Path, content: str, message: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(StartupError) as info:
        Tokens.read(path)
    assert str(info.value).startswith(f"--auth-tokens-file {path}")
    assert message in str(info.value)
    assert "secret" not in str(info.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--auth-tokens-file .* cannot be read: No such file"):
        Tokens.read(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"--auth-tokens-file .* must be UTF-8 text"):
        Tokens.read(tmp_path / "binary")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
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
