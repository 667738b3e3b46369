"""Bearer tokens: which files of them are taken, whom a token belongs to, and that nothing ever quotes one."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

import pytest
import structlog

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
    return Tokens.read(written(tmp_path, f"# who calls\n\nalice {ALICE}\n  bob\t{BOB}  # since May\nalice {SPARE}\n"))


@pytest.mark.parametrize(("token", "name"), [(ALICE, "alice"), (SPARE, "alice"), (BOB, "bob")])
def test_a_token_belongs_to_the_name_beside_it_and_a_name_may_have_two(tokens: Tokens, token: str, name: str) -> None:
    assert tokens.name_of(f"Bearer {token}") == name
    assert tokens.name_of(f"bearer  {token}") == name  # RFC 7235: schemes know no case


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", f"Bearer {ALICE} {BOB}", f"Bearer {ALICE[:-1]}",
              f"Bearer {ALICE}x", f"Bearer {ALICE.upper()}", "Bearer alice", f"Bearer {ALICE}\n", "Bearer ä"]
)  # fmt: skip
def test_what_is_not_a_known_token_belongs_to_nobody(tokens: Tokens, shown: str) -> None:
    assert tokens.name_of(shown) is None


@pytest.mark.parametrize("token", [ALICE, BOB, SPARE, "unknown-token-0123456"])
def test_every_token_is_compared_whichever_is_shown(
    tokens: Tokens, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []

    def compare(one: Any, other: Any) -> bool:
        compared.append((len(one), len(other)))
        return real(one, other)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens.name_of(f"Bearer {token}")
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no token: nobody could call"),
        ("# alice\n", "holds no token: nobody could call"),
        ("secret-secret-secret\n", "line 1: a name and a token are due, here are 1 words"),
        ("alice secret-secret-secret extra", "line 1: a name and a token are due, here are 3 words"),
        ("\nalice secret-15-chars", "line 2: a token has at least 16 characters, here are 15"),
        ("alice secret'secret'secret", "line 1: a token is made of letters, digits"),
        ("alice secret-secret-secret\nbob secret-secret-secret", "line 2: the token of alice comes again"),
        ("alice secret-secret-secret\nalice secret-secret-secret", "line 2: the token of alice comes again"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_in_words_that_quote_no_token(
    tmp_path: Path, content: str, told: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(StartupError) as info:
        Tokens.read(path)
    assert str(info.value).startswith(f"--auth-tokens-file {path}")
    assert told in str(info.value)
    assert "secret" not in str(info.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--auth-tokens-file .* cannot be read: No such file"):
        Tokens.read(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match=r"--auth-tokens-file .* must be text"):
        Tokens.read(tmp_path / "binary")


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_everybody_can_read_is_warned_of(tmp_path: Path, mode: int, warned: bool) -> None:
    with structlog.testing.capture_logs() as logged:
        Tokens.read(written(tmp_path, f"alice {ALICE}", mode))
    assert [each["log_level"] for each in logged] == ["warning"] * warned
    assert ALICE not in str(logged)


def test_the_token_that_is_shown_upstream_is_all_that_its_file_holds(tmp_path: Path) -> None:
    assert read_token("--upstream-token-file", written(tmp_path, f"{ALICE}\n")) == ALICE
    for content in ("secret", f"alice {ALICE}", f"{ALICE}\n{BOB}", ""):
        with pytest.raises(StartupError, match=r"--upstream-token-file .*: a token") as info:
            read_token("--upstream-token-file", written(tmp_path, content))
        assert ALICE not in str(info.value)
        assert "secret" not in str(info.value)
