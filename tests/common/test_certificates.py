"""Certificate files: unusable ones are refused at the start, with the flag and the reason."""

from __future__ import annotations

import shlex
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.security.certificates import read_authorities, read_pair
from tests.certificates import Authority, Issued


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def issued(authority: Authority) -> Issued:
    return authority.issue("one.test")


def openssl(command: str) -> None:
    subprocess.run(["openssl", *shlex.split(command)], check=True, capture_output=True, timeout=30)


def refusal(cert: Path, key: Path, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> str:
    with pytest.raises(StartupError) as info:
        read_pair(cert, key, purpose)
    return str(info.value)


@pytest.mark.parametrize("purpose", [ssl.Purpose.SERVER_AUTH, ssl.Purpose.CLIENT_AUTH])
def test_an_expired_certificate_is_refused(authority: Authority, purpose: ssl.Purpose) -> None:
    old = authority.issue("old.test", not_after=datetime(2024, 1, 1, tzinfo=UTC))
    assert "certificate has expired" in refusal(old.cert, old.key, purpose)


def test_a_certificate_for_clients_only_cannot_serve(tmp_path: Path) -> None:
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 2 -subj /CN=alice"
    openssl(f"req {kind} -addext extendedKeyUsage=clientAuth -out {cert} -keyout {key}")
    pair = read_pair(cert, key, ssl.Purpose.CLIENT_AUTH)
    assert (pair.chain, pair.key) == (cert.read_bytes(), key.read_bytes())
    assert "purpose" in refusal(cert, key)


def test_a_key_with_a_password_is_refused_without_a_prompt(issued: Issued, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    openssl(f"pkey -in {issued.key} -aes128 -passout pass:four -out {locked}")
    assert "needs a password" in refusal(issued.cert, locked)


def test_missing_and_garbled_files_are_named_with_their_flag(issued: Issued, tmp_path: Path) -> None:
    missing, garbled = tmp_path / "missing.pem", tmp_path / "garbled.pem"
    garbled.write_bytes(b"\xff garbage")
    assert refusal(missing, issued.key) == f"--tls-cert {missing} cannot be read: No such file or directory"
    assert refusal(issued.cert, missing) == f"--tls-key {missing} cannot be read: No such file or directory"
    assert "not PEM" in refusal(garbled, issued.key)
    with pytest.raises(StartupError, match=f"--upstream-tls-ca {garbled} must hold certificates in PEM"):
        read_authorities("--upstream-tls-ca", garbled)
