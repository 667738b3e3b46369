"""TLS files and tokens of the client: incomplete settings are rejected, and secrets are never printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import Result

from gridsieve import GridsieveClient
from gridsieve.cli.options import AccessFlags
from gridsieve.client.credentials import Access, credentials_of
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.security.certificates import KeyPair
from gridsieve.common.security.credentials import NO_CREDENTIALS
from tests.certificates import Authority

TOKEN = "alice-0123456789abcdef"


def test_settings_become_the_credentials_of_a_channel_except_on_unix_sockets(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("alice.test")
    access = Access(tls_ca=str(authority.path), tls_cert=own.cert, tls_key=str(own.key), token=TOKEN)
    credentials = credentials_of(access)
    assert credentials.authorities == authority.path.read_bytes()
    assert credentials.pair == KeyPair(own.cert.read_bytes(), own.key.read_bytes())
    assert credentials.metadata == (("authorization", f"Bearer {TOKEN}"),)
    assert credentials.for_channel("10.0.0.7:50053") is not None
    assert credentials.for_channel("unix:/run/generation.sock") is None
    assert TOKEN not in repr(credentials)
    assert "PRIVATE" not in repr(credentials)
    with pytest.raises(StartupError, match=r"one name, not a list, got 127\.0\.0\.1:1,127\.0\.0\.1:2"):
        open_channel("127.0.0.1:1,127.0.0.1:2", credentials)
    assert credentials_of(Access()) == NO_CREDENTIALS


@pytest.mark.parametrize(
    ("access", "told"),
    [
        ({"tls_cert": "c.pem", "tls_key": "k.pem"}, "--tls-cert c.pem needs --tls-ca, which is not set"),
        ({"tls_ca": "/missing.pem"}, "--tls-ca /missing.pem cannot be read: No such file or directory"),
        ({"token": f"{TOKEN}\n"}, "token: a token consists of letters, digits and -._~+/, with = only at its end"),
    ],
)
def test_incomplete_or_invalid_settings_are_rejected(access: Any, told: str) -> None:
    with pytest.raises(StartupError) as info:
        GridsieveClient("127.0.0.1:1", **access)
    assert str(info.value) == told


def test_plain_text_to_a_tls_listener_is_reported_with_the_flags_of_tls(
    gridsieve: Callable[..., Result], tmp_path: Path
) -> None:
    own = Authority(tmp_path).issue("localhost")
    server = grpc.server(ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(own.key.read_bytes(), own.cert.read_bytes())])
    address = f"localhost:{server.add_secure_port('localhost:0', credentials)}"
    server.start()
    result = gridsieve("ask", "What moves?", "--server", address)
    server.stop(0).wait()
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(rf"UNAVAILABLE: {address} .*TLS.* --tls-ca\b.*\n", result.stderr)


def test_the_command_reads_its_token_from_the_file_or_else_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")

    def token(token_file: Path | None) -> str | None:
        return AccessFlags(token_file=token_file).access()["token"]

    assert (token(None), token(path)) == (None, TOKEN)
    monkeypatch.setenv("GRIDSIEVE_TOKEN", "bob-fedcba9876543210")
    assert (token(None), token(path)) == ("bob-fedcba9876543210", TOKEN)
